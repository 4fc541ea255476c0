"""What paged attention costs, by count and without running it: pairs of query and key, FLOPs, bytes, passes.

A FLOP is one addition or one multiplication, so a product of [M, N] by [N, L] has 2 M N L. Counted with full tables:
the S queries of every row are its last tokens.
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import work as attention
from pallas_kernels.attention.tpu_common import LANES
from pallas_kernels.attention.work import BF16, WORD, Work
from pallas_kernels.paged_attention import rows, tpu
from pallas_kernels.paged_attention.shapes import Shape


def spans_of(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """(start_BS, end_BS) of a named shape whose tables are full."""
    end_S = shape.W * shape.P - shape.S + 1 + np.arange(shape.S, dtype=np.int32)
    start_S = np.zeros_like(end_S) if shape.window is None else np.maximum(end_S - shape.window, 0)
    return np.tile(start_S, (shape.B, 1)), np.tile(end_S, (shape.B, 1))


def kernels(shape: Shape, platform: str, tiles: None = None) -> dict[str, Work]:
    """The work of our kernel on a named shape in bfloat16, by its name. {} on a GPU, for which there is none.

    Its passes are blocks of keys; of one key/value head where a head has many queries, else of all.
    """
    if platform != "tpu":
        return {}
    B, S, W, H, G, K, P = (getattr(shape, name) for name in "BSWHGKP")
    start, end = spans_of(shape)
    n = tpu.pages_of(P, W, tpu.BLOCK)
    walked = np.asarray(rows.schedule(jnp.asarray(start), jnp.asarray(end), W * P, n * P, tpu.chains_of(B)), np.int64)
    low, high, first, stop, whole_first, whole_stop, _, _ = walked.T
    pages = int((-(-high // P) - low // P).sum())
    whole = int(np.maximum(np.minimum(stop, whole_stop) - np.maximum(first, whole_first), 0).sum())
    masked = int((stop - first).sum()) - whole
    heads = 1 if tpu.side_by_side(S * H // G) else G
    q, kept = B * S * H * K * BF16, pages * 2 * G * P * K * BF16
    table, spans = B * W * WORD, B * S * 2 * WORD
    pairs = attention.seen_pairs(start, end, W * P)
    return {
        "paged_attention": Work(
            attention.flops(pairs, H, K)[0],
            2 * q + kept + table + spans,
            # A row's table comes with the row before it too; spans are a vector a query of each key/value head.
            2 * q + kept + 2 * table + spans * (H // G) * LANES,
            (whole * heads, masked * heads),
        )
    }
