"""What the loss head costs, by count and without running it: FLOPs, bytes, passes over tiles.

A FLOP is one addition or one multiplication, so a product of [M, N] by [N, L] has 2 M N L.
"""

import jax.numpy as jnp

from pallas_kernels.attention.work import BF16, WORD, Work
from pallas_kernels.loss_head.shapes import Shape
from pallas_kernels.loss_head.tpu import TILES, Tiles

# Products of N D V that each kernel takes: the two backward kernels both make the logits anew.
PRODUCTS = {"loss_head_forward": 1, "loss_head_dx": 2, "loss_head_dw": 2}


def flops(N: int, D: int, V: int) -> tuple[int, int]:
    """(forward, backward) FLOPs of N tokens of width D over V rows: 2 · N · D · V, and twice that.

    What the results need, without the logits made again: the count for a model's utilisation.
    """
    return 2 * N * D * V, 4 * N * D * V


def kernels(shape: Shape, platform: str, tiles: Tiles | None = None) -> dict[str, Work]:
    """The work of our kernels on a named shape in bfloat16, by kernel. {} on a GPU, for which there are none."""
    if platform != "tpu":
        return {}
    N, D, V = shape.N, shape.D, shape.V
    tiles = (tiles or TILES[jnp.dtype(jnp.bfloat16)]).fit(N, V)
    blocks_n, blocks_v = -(-N // tiles.n), -(-V // tiles.v)
    x, w, number = N * D * BF16, V * D * BF16, N * WORD
    # The kernels that keep tokens have a body of its own for a last tile that reaches beyond w, before the other.
    visits = (blocks_n, blocks_n * (blocks_v - 1)) if V % tiles.v else (blocks_n * blocks_v,)
    once = {
        "loss_head_forward": x + w + 4 * number,  # target; its logit, lse, entropy
        "loss_head_dx": 2 * x + w + 4 * number,  # x, dx; target, lse and two gradients
        "loss_head_dw": x + 2 * w + 4 * number,
    }
    again = {
        "loss_head_forward": (blocks_n - 1) * w,
        "loss_head_dx": (blocks_n - 1) * w,
        "loss_head_dw": (blocks_v - 1) * (x + 4 * number),
    }
    passes = {"loss_head_forward": visits, "loss_head_dx": visits, "loss_head_dw": (blocks_n * blocks_v,)}
    product = flops(N, D, V)[0]
    return {name: Work(n * product, once[name], once[name] + again[name], passes[name]) for name, n in PRODUCTS.items()}
