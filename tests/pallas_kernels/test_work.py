"""Counts of work against brute force: every pair, block and row by itself."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import blocks
from pallas_kernels.attention import work as attention_work
from pallas_kernels.attention.shapes import NORTH as ATTENTION
from pallas_kernels.attention.shapes import Shape as AttentionShape
from pallas_kernels.attention.tpu_common import Tiles
from pallas_kernels.grouped_matmul import tpu
from pallas_kernels.grouped_matmul import work as grouped_work
from pallas_kernels.grouped_matmul.schedule import computed_rows, schedule, unit_rows
from pallas_kernels.grouped_matmul.shapes import NORTH as GROUPED
from pallas_kernels.grouped_matmul.shapes import Shape as GroupedShape
from pallas_kernels.loss_head import tpu as loss_head
from pallas_kernels.loss_head import work as loss_head_work
from pallas_kernels.loss_head.shapes import Shape as LossHeadShape
from pallas_kernels.paged_attention import work as paged_work
from pallas_kernels.paged_attention.shapes import Shape as PagedShape

SMALL = {
    "causal": AttentionShape(S=384, H=4, G=2, K=128),
    "window": AttentionShape(S=384, H=4, G=2, K=128, window=100),
    "packed": AttentionShape(S=384, H=4, G=1, K=128, document=150),
    "packed_window": AttentionShape(S=384, H=2, G=2, K=128, window=130, document=250),
}


@functools.cache
def seen(shape: AttentionShape) -> np.ndarray:
    """[S, S], a pair at a time."""

    def one(i: int, j: int) -> bool:
        near = shape.window is None or i - j < shape.window
        return j <= i and near and (shape.document is None or i // shape.document == j // shape.document)

    return np.array([[one(i, j) for j in range(shape.S)] for i in range(shape.S)])


@pytest.mark.parametrize("name", SMALL)
def test_attention_flops_are_two_a_product_of_each_seen_pair(name):
    shape = SMALL[name]
    pairs = int(seen(shape).sum())
    assert attention_work.seen_pairs(*attention_work.spans_of(shape), shape.S) == pairs
    forward, backward = attention_work.flops(pairs, shape.H, shape.K)
    # q k and p v; then dout v, p dout, ds k and ds q: each K multiplications and K additions a pair and head.
    assert (forward, backward) == (2 * pairs * shape.H * 2 * shape.K, 4 * pairs * shape.H * 2 * shape.K)
    for platform in ("tpu", "cuda"):
        found = {name: work.flops for name, work in attention_work.kernels(shape, platform).items()}
        # The backward kernels make s twice more, and dp once more.
        assert found["attention_forward"] == forward
        assert found["attention_dq"] + found["attention_dkv"] == backward + 3 * forward // 2


def test_spans_outside_the_keys_hold_no_pairs():
    start, end = np.array([[-5, 3, 7, 9]]), np.array([[2, 12, 6, 20]])
    assert attention_work.seen_pairs(start, end, 8) == 2 + 5 + 0 + 0


def test_a_long_rows_pairs_do_not_overflow():
    shape = ATTENTION["full_128k"]
    assert attention_work.seen_pairs(*attention_work.spans_of(shape), shape.S) == shape.S * (shape.S + 1) // 2
    window = ATTENTION["window_128k"]
    pairs = window.window * (window.window + 1) // 2 + (window.S - window.window) * window.window
    assert attention_work.seen_pairs(*attention_work.spans_of(window), window.S) == pairs


@pytest.mark.parametrize("name", SMALL)
def test_attention_blocks_and_bytes_on_a_tpu(name):
    shape, tiles = SMALL[name], Tiles(q=128, k=128, compute=128)
    by_block = seen(shape).reshape(shape.S // 128, 128, shape.S // 128, 128)
    some, whole = by_block.any((1, 3)), by_block.all((1, 3))
    works = attention_work.kernels(shape, "tpu", tiles)
    assert works["attention_forward"].passes == (whole.sum() * shape.H, (some & ~whole).sum() * shape.H)
    assert works["attention_forward"].passes == works["attention_dq"].passes == works["attention_dkv"].passes
    # One fetch at a time: q and out, the log-sum-exp and the spans once; k and v of every block with a seen pair.
    heads = shape.H // shape.G
    forward = dkv = 0
    for _, i in itertools.product(range(shape.G), range(shape.S // 128)):
        forward += 2 * 128 * heads * shape.K * 2 + 128 * heads * 4 + 2 * 128 * 4
        forward += 2 * some[i].sum() * 128 * shape.K * 2
        dkv += 4 * 128 * shape.K * 2
        dkv += some[:, i].sum() * (2 * 128 * heads * shape.K * 2 + 2 * 128 * heads * 4 + 2 * 128 * 4)
    assert works["attention_forward"].fetched == forward
    assert works["attention_dkv"].fetched == dkv
    q, kv = shape.S * shape.H * shape.K * 2, shape.S * shape.G * shape.K * 2
    assert works["attention_forward"].bytes == 2 * q + 2 * kv + 4 * shape.S * shape.H + 8 * shape.S


@pytest.mark.parametrize("name", SMALL)
def test_attention_bytes_on_a_gpu(name):
    shape = SMALL[name]
    mask = seen(shape)
    keys = mask.reshape(shape.S // 128, 128, shape.S // 128, 128).any((1, 3)).sum()
    works = attention_work.kernels(shape, "cuda")
    q, number = shape.S * shape.H * shape.K * 2, shape.S * shape.H * 4
    streamed = shape.H * (keys * 2 * 128 * shape.K * 2 + 8 * shape.S)
    assert works["attention_forward"].fetched == 2 * q + number + streamed
    assert works["attention_dq"].fetched == 3 * q + 2 * number + streamed
    queries = mask.reshape(shape.S // 64, 64, shape.S // 128, 128).any((1, 3)).sum()
    dkv = 4 * shape.S * shape.G * shape.K * 2 + shape.H * queries * 64 * (2 * shape.K * 2 + 16)
    assert works["attention_dkv"].fetched == dkv


def test_a_block_that_nobody_sees_is_a_pass_of_a_range():
    """The bounds that work is counted from are those that the kernels walk."""
    shape = SMALL["packed"]
    start, end = attention_work.spans_of(shape)
    bounds = blocks.query_bounds(start, end, shape.S, 128, 128)
    walked = int((bounds[..., 1] - bounds[..., 0]).sum()) * shape.H
    assert sum(attention_work.kernels(shape, "tpu", Tiles(128, 128, 128))["attention_dq"].passes) == walked


@pytest.mark.parametrize("split", [True, False])
def test_pieces_are_those_of_the_kernel(split):
    counts = np.arange(0, 513, 16)
    piece = 128 if split else 256
    found = []
    with jax.disable_jit():
        for count in counts:
            tpu._each_piece(
                jnp.int32(0), jnp.int32(count), 512, 16, piece, split, lambda start, size, first: found.append(size)
            )
    sizes = [128, 64, 32, 16] if split else [256, *range(16, 256, 16)]
    assert grouped_work.pieces(counts, 512, 16, piece, split=split) == tuple(found.count(size) for size in sizes)


def test_grouped_flops_are_two_a_row_and_number_of_its_matrix():
    shape = GroupedShape(P=300, D=32, F=256, E=4)
    sizes = grouped_work.uniform_sizes(shape.P, shape.E)
    assert sizes.sum() == shape.P
    rows = sum(int(size) for size in sizes)
    assert grouped_work.flops(rows, shape.D, shape.F) == (2 * 300 * 32 * 256, 2 * 2 * 300 * 32 * 256)
    works = grouped_work.kernels(shape, "tpu")
    products = {
        "grouped_forward": 1,
        "grouped_dx": 1,
        "grouped_dw": 1,
        "gated_forward": 2,
        "gated_dx": 2,
        "gated_dw": 2,
    }
    assert {name: work.flops for name, work in works.items()} == {
        name: n * 2 * 300 * 32 * 256 for name, n in products.items()
    }
    assert grouped_work.kernels(shape, "cuda") == {}


def test_grouped_bytes_and_rows():
    shape = GroupedShape(P=300, D=256, F=256, E=4)
    x, y, w = (n * 2 for n in (300 * 256, 300 * 256, 4 * 256 * 256))
    whole = grouped_work.kernels(shape, "tpu", tpu.Tiles(rows=64, columns=256, piece=32, depth=64))
    halves = grouped_work.kernels(shape, "tpu", tpu.Tiles(rows=64, columns=128, piece=32, depth=64))
    for works, times in ((whole, 1), (halves, 2)):
        assert works["grouped_forward"].bytes == works["grouped_dw"].bytes == x + w + y
        assert works["grouped_forward"].fetched == times * x + w + y
        assert works["gated_dx"].fetched == times * 3 * y + 2 * w + x
        assert works["gated_dw"].fetched == times * x + 3 * y + 2 * w
    sizes = jnp.asarray(grouped_work.uniform_sizes(300, 4))
    for name, empty in (("grouped_forward", False), ("grouped_dw", True)):
        _, _, low, high = schedule(sizes, 300, 64, empty=empty)
        # A visit's own rows, and what else the units at its two ends hold.
        rows = sum(
            -(-h // 16) * 16 - lo // 16 * 16 for lo, h in zip(low.tolist(), high.tolist(), strict=True) if h > lo
        )
        assert whole[name].rows == rows == int(computed_rows(low, high, unit_rows(jnp.bfloat16)).sum())


@pytest.mark.parametrize("kernel", ["grouped_forward", "grouped_dx", "grouped_dw", "gated_dw"])
@pytest.mark.parametrize("name", ["train_8k_up", "train_8k_down"])
def test_at_most_five_in_a_hundred_rows_more_than_the_groups_have(name, kernel):
    shape = GROUPED[name]
    tiles = tpu.TILES[jnp.dtype(jnp.bfloat16)]
    work = grouped_work.kernels(shape, "tpu")[kernel]
    depth = tiles.depth if kernel.endswith("dw") else tiles.piece
    sizes = [depth, *range(16, depth, 16)] if kernel.endswith("dw") else [depth >> n for n in range(4)]
    # By the products the kernel makes of them, not by the formula for its visits.
    multiplied = sum(n * size for n, size in zip(work.passes, sizes, strict=True))
    assert multiplied == work.rows
    assert shape.P < multiplied <= 1.05 * shape.P


@pytest.mark.parametrize("V", [1024, 1100])
def test_loss_head_by_tile(V):
    shape, tiles = LossHeadShape(N=600, D=256, V=V), loss_head.Tiles(n=128, v=256, compute=128)
    works = loss_head_work.kernels(shape, "tpu", tiles)
    product = 2 * shape.N * shape.D * V
    assert loss_head_work.flops(shape.N, shape.D, V) == (product, 2 * product)
    # Both backward kernels make the logits again.
    assert [work.flops for work in works.values()] == [product, 2 * product, 2 * product]
    x, w, numbers = shape.N * shape.D * 2, V * shape.D * 2, 4 * shape.N * 4
    assert [work.bytes for work in works.values()] == [x + w + numbers, 2 * x + w + numbers, x + 2 * w + numbers]
    tokens, rows = range(0, shape.N, tiles.n), range(0, V, tiles.v)
    visits = {
        ragged: sum((row + tiles.v > V) == ragged for _, row in itertools.product(tokens, rows)) for ragged in (1, 0)
    }
    for name, once in (("loss_head_forward", x + numbers), ("loss_head_dx", 2 * x + numbers)):
        assert works[name].fetched == once + sum(w for _ in tokens)
        assert works[name].passes == tuple(visits[ragged] for ragged in (1, 0) if visits[ragged])
    assert works["loss_head_dw"].fetched == 2 * w + sum(x + numbers for _ in rows)
    assert works["loss_head_dw"].passes == (len(tokens) * len(rows),)
    assert loss_head_work.kernels(shape, "cuda") == {}


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("S", [2, 40])
def test_paged_attention_by_key(S, window):
    shape = PagedShape(B=3, S=S, W=80, H=8, G=2, K=128, P=16, window=window)
    T = shape.W * shape.P
    last = np.arange(T - S, T)[:, None]
    key = np.arange(T)
    sees = (key <= last) & (True if window is None else key > last - window)
    work = paged_work.kernels(shape, "tpu")["paged_attention"]
    assert work.flops == 3 * sees.sum() * 8 * 4 * 128
    pages = 3 * sees.any(0).reshape(80, 16).any(1).sum()
    q, kept, table = 3 * S * 8 * 128 * 2, pages * 2 * 2 * 16 * 128 * 2, 3 * 80 * 4
    assert work.bytes == 2 * q + kept + table + 3 * S * 2 * 4
    # Of a row's spans 128 lanes a query of one key/value head, and its table with the row before it too.
    assert work.fetched == 2 * q + kept + 2 * table + 3 * S * 2 * 4 * 4 * 128
    blocks = np.pad(sees, ((0, 0), (0, -T % 512))).reshape(S, -1, 512)
    some, whole = blocks.any((0, 2)).sum(), blocks.all((0, 2)).sum()
    # Of 128 queries at most the two heads are one body.
    heads = 1 if S == 2 else 2
    assert work.passes == (3 * whole * heads, 3 * (some - whole) * heads)
    assert paged_work.kernels(shape, "cuda") == {}
