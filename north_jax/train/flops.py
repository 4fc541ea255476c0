"""The FLOPs that a training step is worth, by count: what tokens/s and MFU are reckoned with, here and nowhere else."""

import jax
import numpy as np
from jax.sharding import Mesh

from north_jax.model.config import ModelConfig
from pallas_kernels.chips import CHIPS

# What `jax.Device.device_kind` calls the chips of `pallas_kernels.chips`.
_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "tpu7x",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
}


def step_flops(config: ModelConfig, segment_ids_BS: np.ndarray) -> int:
    """FLOPs of forward and backward over a batch's tokens; the backward pass counts twice the forward one.

    A FLOP is one addition or one multiplication. With n tokens that are not padding (segment 0), and pairs of a query
    and a key it sees (of its document, not after it, within the window), forward:

        n Σ_layers [4 D K (H + G) + (dense: 6 D F; experts: 6 D F C + 2 D E)]  +  Σ_layers 4 pairs H K  +  2 n D V

    Padding, recomputation, norms, softmax and routing are not counted: it is work that the result needs.
    """
    tokens, pairs = visible(segment_ids_BS, None)
    _, windowed = visible(segment_ids_BS, config.window)
    D, H, G, K = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    E, C = config.num_experts, config.num_experts_per_tok
    total = 2 * tokens * D * config.vocab_size
    for layer in range(config.num_hidden_layers):
        dense = 6 * D * config.prefix_dense_intermediate_size
        feed_forward = dense if config.is_dense(layer) else 6 * D * config.intermediate_size * C + 2 * D * E
        total += tokens * (4 * D * K * (H + G) + feed_forward)
        total += 4 * (windowed if config.is_sliding(layer) else pairs) * H * K
    return 3 * total


def visible(segment_ids_BS: np.ndarray, window: int | None) -> tuple[int, int]:
    """(tokens that are not padding, pairs of such a query and a key that it sees)."""
    ids_BS = np.asarray(segment_ids_BS)
    begins_BS = np.ones(ids_BS.shape, bool)
    begins_BS[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
    (first,) = np.nonzero(begins_BS.ravel())
    lengths = np.diff(first, append=ids_BS.size)[ids_BS.ravel()[first] > 0].astype(np.int64)
    reach = lengths if window is None else np.minimum(lengths, window)
    return int(lengths.sum()), int((reach * (reach + 1) // 2 + (lengths - reach) * reach).sum())


def peak_flops(device: jax.Device) -> float | None:
    """bfloat16 FLOPs/s of the device by its data sheet; None where it is not known, as for a CPU."""
    kinds = [kind for kind in _KINDS if device.device_kind.startswith(kind)]
    return CHIPS[_KINDS[max(kinds, key=len)]].flops if kinds else None


def utilisation(flops: int, seconds: float, mesh: Mesh) -> dict[str, float]:
    """The metrics "tflops" and, where the chip's peak is known, "mfu" of a step of so many FLOPs on the mesh."""
    rate, peak = flops / seconds / mesh.size, peak_flops(mesh.devices.flat[0])
    return {"tflops": rate / 1e12} | ({} if peak is None else {"mfu": rate / peak})
