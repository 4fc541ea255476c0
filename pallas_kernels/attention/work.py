"""What attention costs, by count and without running it: pairs of query and key, FLOPs, bytes, passes over blocks.

A FLOP is one addition or one multiplication, so a product of [M, N] by [N, L] has 2 M N L. Only pairs that are seen
count: half of a causal row, less under a window or with documents. Counts are of one call on all its rows.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import blocks, gpu, gpu_backward, gpu_common
from pallas_kernels.attention.api import spans
from pallas_kernels.attention.shapes import Shape
from pallas_kernels.attention.tpu_common import Tiles

# Products over the seen pairs that each kernel takes: the two backward kernels both make s and dp anew.
PRODUCTS = {"attention_forward": 2, "attention_dq": 3, "attention_dkv": 4}
BF16, WORD = 2, 4


@dataclasses.dataclass(frozen=True)
class Work:
    """What one kernel has to do.

    flops: of its products over seen pairs. bytes: inputs and outputs, once. fetched: bytes with the blocks that its
    schedule reads again. passes: how often each body of its program runs, for attention blocks of one head that it
    takes whole and under a mask (empty: not known).
    """

    flops: int
    bytes: int
    fetched: int
    passes: tuple[int, ...] = ()


def seen_pairs(start_BS: np.ndarray, end_BS: np.ndarray, T: int) -> int:
    """How many (query, key) pairs spans over T keys hold: Σ max(0, min(end, T) - max(start, 0))."""
    start, end = (np.clip(np.asarray(x, np.int64), 0, T) for x in (start_BS, end_BS))
    return int(np.maximum(end - start, 0).sum())


def flops(pairs: int, H: int, K: int) -> tuple[int, int]:
    """(forward, backward) FLOPs of attention over so many pairs: 4 · pairs · H · K, and twice that.

    What the results need: s = q k and p v forward; dv, dp, dq and dk backward. Scores that a backward kernel makes
    again are not counted, so this is the count for a model's utilisation.
    """
    return 4 * pairs * H * K, 8 * pairs * H * K


def spans_of(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """(start_1S, end_1S) of a named shape: its window, and documents of its length one after another."""
    ids = None if shape.document is None else (np.arange(shape.S) // shape.document)[None].astype(np.int32)
    start, end = jax.tree.map(np.asarray, spans(shape.S, window=shape.window, segment_ids_BS=ids))
    return start, end


def kernels(shape: Shape, platform: str, tiles: Tiles | None = None) -> dict[str, Work]:
    """The work of our kernels on one row of a named shape in bfloat16, by kernel; `tiles` of the TPU's."""
    return _on_tpu(shape, tiles or Tiles()) if platform == "tpu" else _on_gpu(shape)


def _once(shape: Shape) -> tuple[int, int, int]:
    """Bytes of q (or out, or their gradients), of k (or v, …) and of one float32 number a query and head."""
    return shape.S * shape.H * shape.K * BF16, shape.S * shape.G * shape.K * BF16, shape.S * shape.H * WORD


def _works(shape: Shape, fetched: dict[str, int], passes: dict[str, tuple[int, ...]]) -> dict[str, Work]:
    start, end = spans_of(shape)
    product = 2 * seen_pairs(start, end, shape.S) * shape.H * shape.K
    q, k, number = _once(shape)
    spans_bytes = 2 * shape.S * WORD
    once = {
        "attention_forward": 2 * q + 2 * k + number + spans_bytes,  # q, out; k, v; the log-sum-exp
        "attention_dq": 3 * q + 2 * k + 2 * number + spans_bytes,  # q, dout, dq; k, v; lse, delta
        "attention_dkv": 2 * q + 4 * k + 2 * number + spans_bytes,  # q, dout; k, v, dk, dv; lse, delta
    }
    return {name: Work(PRODUCTS[name] * product, once[name], fetched[name], passes.get(name, ())) for name in PRODUCTS}


def _on_tpu(shape: Shape, tiles: Tiles) -> dict[str, Work]:
    tiles = tiles.fit(shape.S, shape.S)
    start, end = (np.pad(x, ((0, 0), (0, -shape.S % tiles.q))) for x in spans_of(shape))
    T = -(-shape.S // tiles.k) * tiles.k
    bounds = np.asarray(blocks.query_bounds(start, end, T, tiles.q, tiles.k), np.int64)[0]
    first, stop, full_first, full_stop = bounds.T
    held = int((stop - first).sum())
    whole = int(np.maximum(np.minimum(stop, full_stop) - np.maximum(first, full_first), 0).sum())
    by_key = np.asarray(blocks.key_bounds(bounds[None], T // tiles.k), np.int64)[0]
    held_by_key = int((by_key[:, 1] - by_key[:, 0]).sum())
    q, k, number = _once(shape)
    spans_bytes = 2 * shape.S * WORD
    keys = held * shape.G * 2 * tiles.k * shape.K * BF16
    # Per block of queries and key/value head: q and dout of its heads, lse and delta, and the spans.
    heads = shape.H // shape.G
    query_block = tiles.q * (2 * heads * shape.K * BF16 + 2 * heads * WORD + 2 * WORD)
    fetched = {
        "attention_forward": 2 * q + number + shape.G * spans_bytes + keys,
        "attention_dq": 3 * q + 2 * number + shape.G * spans_bytes + keys,
        "attention_dkv": 4 * k + held_by_key * shape.G * query_block,
    }
    # The query blocks of a key block are a range: one that holds no seen pair is taken under the mask.
    passes = {
        "attention_forward": (whole * shape.H, (held - whole) * shape.H),
        "attention_dq": (whole * shape.H, (held - whole) * shape.H),
        "attention_dkv": (whole * shape.H, (held_by_key - whole) * shape.H),
    }
    return _works(shape, fetched, passes)


def _on_gpu(shape: Shape) -> dict[str, Work]:
    """Each query head fetches its own key blocks, each key block its queries; L2 serves some of these again."""
    start, end = spans_of(shape)
    S, T = shape.S, shape.S

    def limits(tile: int):
        return gpu_common.limits(jnp.asarray(start), jnp.asarray(end), T, tile)

    q, k, number = _once(shape)
    fetched = {}
    for name, tiles, own in (
        ("attention_forward", gpu.FORWARD, 2 * q + number),
        ("attention_dq", gpu_backward.DQ, 3 * q + 2 * number),
    ):
        bounds = np.asarray(gpu_common.tile_bounds(limits(tiles.tile), T, tiles), np.int64)[0]
        held = int((bounds[:, 1] - bounds[:, 0]).sum())
        fetched[name] = own + shape.H * (2 * S * WORD + held * 2 * tiles.block * shape.K * BF16)
    tiles = gpu_backward.DKV
    bounds = np.asarray(gpu_backward.key_tile_bounds(limits(tiles.block), T, tiles), np.int64)[0]
    held = int((bounds[:, 1] - bounds[:, 0]).sum())
    fetched["attention_dkv"] = 4 * k + shape.H * held * tiles.block * (2 * shape.K * BF16 + 2 * WORD + 2 * WORD)
    return _works(shape, fetched, {})
