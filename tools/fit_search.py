"""Which meshes of a slice to try, the one that sends least first: by closed forms, which `tools/fit.py` then checks.

Per device and step, with b = 2 bytes a number, T tokens of its own, L layers, and three passes (forward, its repetition
under remat, backward; the gradients' reduce-scatter is the third of parameters):

    fsdp     3 (f-1)/f (dense / t + experts / (e t)) b        parameters of a device's part of experts and widths
    expert   3 L_moe T (e-1) (2 D b + 4 C), ragged beyond C: 3 L_moe T 2 (e-1)/e C D b     docs/kernels.md, experts
    tensor   4 L 2 (t-1)/t T D b                              sums of activations, two a layer and direction
    context  3 (L_sliding 4 h B G K b + L_full 2 (c-1) T G K b)       docs/meshes.md, context
"""

import itertools
import math

from north_jax.model import ModelConfig

BYTES, PASSES = 2, 3


def candidates(config: ModelConfig, devices: int, sequence: int, rows: int) -> list[dict[str, int]]:
    """The meshes {fsdp, expert, context, tensor} that the model, the rows and the sequence divide over."""
    found = []
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    for expert, context, tensor in itertools.product(sizes, repeat=3):
        fsdp, rest = divmod(devices, expert * context * tensor)
        fits = not rest and config.num_experts % expert == 0 and config.num_key_value_heads % tensor == 0
        fits = fits and rows % (fsdp * expert) == 0 and config.hidden_size % fsdp == 0
        if fits and (context == 1 or sequence % (2 * context) == 0):
            found.append({"fsdp": fsdp, "expert": expert, "context": context, "tensor": tensor})
    return found


def sent(config: ModelConfig, mesh: dict[str, int], sequence: int, rows: int, parameters: tuple[int, int]) -> float:
    """Bytes that a device sends in a step, by the closed forms; `parameters`: (dense ones, those of experts)."""
    f, e, c, t = (mesh[axis] for axis in ("fsdp", "expert", "context", "tensor"))
    own_rows = rows // (f * e)
    T, D, C = own_rows * sequence // c, config.hidden_size, config.num_experts_per_tok
    G, K, L = config.num_key_value_heads // t, config.head_dim, config.num_hidden_layers
    dense, experts = parameters
    total = PASSES * (f - 1) / f * (dense / t + experts / (e * t)) * BYTES
    moe_layers = sum(not config.is_dense(i) for i in range(L))
    exchange = (e - 1) * (2 * D * BYTES + 4 * C) if e <= C else 2 * (e - 1) / e * C * D * BYTES
    total += PASSES * moe_layers * T * exchange
    total += 4 * L * 2 * (t - 1) / t * T * D * BYTES
    if c > 1:
        halo = min(config.window - 1, sequence - sequence // (2 * c))
        sliding = sum(config.is_sliding(i) for i in range(L))
        keys = sliding * 4 * halo * own_rows + (L - sliding) * 2 * (c - 1) * T
        total += PASSES * keys * G * K * BYTES
    return total


def by_cost(config: ModelConfig, devices: int, sequence: int, rows: int, parameters: tuple[int, int]) -> list[dict]:
    """`candidates`, the fewest bytes first."""
    found = candidates(config, devices, sequence, rows)
    return sorted(found, key=lambda mesh: sent(config, mesh, sequence, rows, parameters))


def named(mesh: dict[str, int]) -> str:
    """ "fsdp=16,expert=4" of {"fsdp": 16, "expert": 4, "context": 1, "tensor": 1}."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "fsdp=1"


def most_tokens(points: list[tuple[int, int]], capacity: int) -> int:
    """Tokens a device where a line through two (tokens, peak bytes) reaches `capacity`; down to a multiple of 1,024."""
    (few, low), (many, high) = sorted(points)
    slope = (high - low) / (many - few)
    return math.floor((few + (capacity - low) / slope) / 1024) * 1024
