"""Forward attention on Hopper: Pallas Mosaic GPU, one memory warpgroup feeding compute warpgroups.

Every query i of row b sees the keys start_BS[b, i] <= j <= i + offset, which is a sliding window, packed documents and
causality in one array. `start_BS` does not decrease along a row, so a tile of queries sees one run of key blocks; only
these are fetched, and only blocks that some query sees in part are masked.

Schedule (FlashAttention-3's): the product Q K^T of the next block is in flight with P V of the last one while the
softmax of this one runs, and the two compute warpgroups take turns at the tensor cores.

The kernels are compiled for H100 and H200 without spills and have not been run on either: nothing is known about
their speed. The tests run them on small shapes in an extension of jax's interpreter, races included, and check their
block loops in plain numpy with the bounds of this file.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)
# wgmma reads rows of 128 bytes, swizzled, in groups of eight.
LAYOUT = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
# The running maximum starts at a finite value, so that rows without a visible key yet give exp2(-inf), never inf - inf.
NO_MAXIMUM = -1e30
COMPILER = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows of one compute warpgroup, rows of the blocks that stream past it, their stages in shared memory.

    rows: multiple of 64. block: multiple of 64. registers: of a compute and of a memory thread; a block of threads
    starts with 65,536 / threads each and moves them from the memory warpgroup to the others.
    """

    rows: int = 64
    block: int = 128
    stages: int = 2
    warpgroups: int = 2
    registers: tuple[int, int] = (240, 24)

    @property
    def tile(self) -> int:
        """Rows of a block of threads."""
        return self.rows * self.warpgroups


FORWARD = Tiles()


def key_bounds(start_BS: jax.Array, T: int, offset: int, tile: int, parts: int, block: int) -> jax.Array:
    """Which key blocks each tile of `tile` queries sees: int32 [B, tiles, 2 + 2 * parts].

    For tile u: blocks lo <= n < hi hold every visible key (at least one block is named, even where nothing is seen).
    Then, for each of `parts` equal parts of the tile, the blocks lo <= n < hi that all its queries see wholly.
    `start_BS` does not decrease along S; S is any length.
    """
    B, S = start_BS.shape
    tiles = pl.cdiv(S, tile)
    blocks = pl.cdiv(T, block)
    start_BS = padded(start_BS, tile)

    def per(rows: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The first and last start of each run of `rows` queries, and the last keys of its first and last query."""
        first_N = jnp.arange(0, tiles * tile, rows, dtype=jnp.int32)
        last_N = jnp.minimum(first_N + rows, S) - 1
        starts_BNR = start_BS.reshape(B, -1, rows)
        return starts_BNR[:, :, 0], starts_BNR[:, :, -1], *(jnp.minimum(x + offset, T - 1) for x in (first_N, last_N))

    start_BU, _, _, end_U = per(tile)
    lo_BU = jnp.clip(start_BU // block, 0, blocks - 1)
    hi_BU = jnp.maximum(end_U // block + 1, lo_BU + 1)
    _, start_BN, end_N, _ = per(tile // parts)
    whole_BN = jnp.stack(jnp.broadcast_arrays(pl.cdiv(start_BN, block), (end_N + 1) // block), axis=-1)
    return jnp.concatenate([jnp.stack([lo_BU, hi_BU], axis=-1), whole_BN.reshape(B, tiles, 2 * parts)], axis=-1)


def padded(x: jax.Array, tile: int, **how) -> jax.Array:
    """x with its last axis grown to a multiple of `tile` (by default with copies of its last element)."""
    extra = -x.shape[-1] % tile
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, extra)], **(how or {"mode": "edge"})) if extra else x


def grown(x_BSHK: jax.Array, block: int) -> jax.Array:
    """x with at least `block` rows and a multiple of 8, by zeros.

    A copy from global memory may pass the end of an array, but is not larger than it, and wgmma's tiles have 8 rows.
    """
    S = x_BSHK.shape[1]
    extra = max(block, -(-S // 8) * 8) - S
    return jnp.pad(x_BSHK, ((0, 0), (0, extra), (0, 0), (0, 0))) if extra else x_BSHK


def columns(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """One value per row, repeated along the columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def limits(start_BS: jax.Array, T: int, offset: int, tile: int) -> jax.Array:
    """[B, 2, S grown to a multiple of tile] int32: the first and the last key that each query sees."""
    end_S = jnp.minimum(jnp.arange(start_BS.shape[1], dtype=jnp.int32) + offset, T - 1)
    return padded(jnp.stack([start_BS, jnp.broadcast_to(end_S, start_BS.shape)], axis=1), tile)


def store_places(place_smem) -> None:
    """Fills place_smem with 0, 1, 2, …

    Column numbers come from shared memory because the compiler would compute an iota once, before the loop, and hold
    one register per column through it: the backward kernels would spill.
    """
    place_smem[...] = plgpu.broadcasted_iota(jnp.int32, place_smem.shape, 0, layout=COLUMNS)


def masked_scores(s: jax.Array, place_smem, first: jax.Array, last: jax.Array) -> jax.Array:
    """s with -inf where a column's place is not between its row's `first` and `last`."""
    place = lax.broadcast_in_dim(plgpu.load(place_smem, (), layout=COLUMNS), s.shape, [1])
    return jnp.where((place >= columns(first, s.shape)) & (place <= columns(last, s.shape)), s, -jnp.inf)


def empty(shape: tuple[int, int]) -> jax.Array:
    """Zeros in the registers of an accumulator."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def stream_blocks(streams, tiles: Tiles, lo: jax.Array, count: jax.Array, at) -> None:
    """Blocks lo, …, lo + count - 1 of every (source, buffers, full, free, delay) into its buffers.

    `at` gives the index of a run of rows in a source. Copies are asked for in the order of their use: a stream with a
    delay of one is used one step later than the others.
    """

    @pl.loop(0, count + max(delay for *_, delay in streams))
    def fetch(step):
        for source, buffers, full, free, delay in streams:

            @pl.when((step >= delay) & (step < count + delay))
            def copy(source=source, buffers=buffers, full=full, free=free, block=step - delay):
                slot = lax.rem(block, jnp.int32(tiles.stages))

                @pl.when(block >= tiles.stages)
                def wait():
                    plgpu.barrier_wait(free.at[slot])

                run = pl.ds((lo + block) * tiles.block, tiles.block)
                plgpu.copy_gmem_to_smem(source.at[at(run)], buffers.at[slot], full.at[slot])

    drain([free for _, _, _, free, _ in streams], tiles.stages, count)


def drain(free, stages: int, count: jax.Array) -> None:
    """Waits until the last blocks are released, so that no barrier is left half seen."""

    @pl.loop(jnp.maximum(count - stages, 0), count)
    def wait(step):
        for barrier in free:
            plgpu.barrier_wait(barrier.at[lax.rem(step, jnp.int32(stages))])


def launch(kernel, name: str, tiles: Tiles, grid, q_shape, k_shape, **types):
    """The kernel over (batch, tile, head), a memory warpgroup beside the others of `tiles`.

    Heads vary fastest: the query heads of one key/value head run side by side and share its blocks in L2.
    """
    return plgpu.kernel(
        functools.partial(kernel, tiles=tiles, R=q_shape[2] // k_shape[2], scale=q_shape[3] ** -0.5),
        **types,
        grid=grid,
        grid_names=("batch", "tile", "head"),
        num_threads=tiles.warpgroups + 1,
        thread_name="wg",
        kernel_name=name,
        compiler_params=COMPILER,
    )


def _kernel(
    q_ref, k_ref, v_ref, limits_ref, bounds_ref, out_ref, lse_ref,
    q_smem, k_smem, v_smem, limits_smem, place_smem, lse_smem, q_full, k_full, v_full, k_free, v_free, turn,
    *, tiles: Tiles, R: int, scale: float,
):  # fmt: skip
    rows, block, stages = tiles.rows, tiles.block, tiles.stages
    b, head = lax.axis_index("batch"), lax.axis_index("head")
    # The last tiles see most keys: they start first, so that the short ones fill the end.
    tile = lax.axis_size("tile") - 1 - lax.axis_index("tile")
    wg = lax.axis_index("wg")
    lo = bounds_ref[b, tile, 0]
    count = bounds_ref[b, tile, 1] - lo

    @pl.when(wg < tiles.warpgroups)
    def compute():
        plgpu.set_max_registers(tiles.registers[0], action="increase")
        first_row = tile * tiles.tile + wg * rows
        run = pl.ds(first_row, rows)
        plgpu.copy_gmem_to_smem(q_ref.at[b, run, head], q_smem.at[wg], q_full.at[wg])
        plgpu.copy_gmem_to_smem(limits_ref.at[b, :, run], limits_smem.at[wg], q_full.at[wg])
        store_places(place_smem.at[wg])
        whole_lo, whole_hi = bounds_ref[b, tile, 2 + 2 * wg], bounds_ref[b, tile, 3 + 2 * wg]
        plgpu.barrier_wait(q_full.at[wg])
        first, end = (plgpu.load(limits_smem.at[wg, i], (), layout=ROWS) for i in range(2))

        def softmax(step, s, m, l):
            n = lo + step
            s = lax.cond(
                (n >= whole_lo) & (n < whole_hi),
                lambda s: s,
                lambda s: masked_scores(s, place_smem.at[wg], first - n * block, end - n * block),
                s,
            )
            m_new = jnp.maximum(m, s.max(axis=1) * (scale * LOG2E))
            p = jnp.exp2(s * (scale * LOG2E) - columns(m_new, s.shape))
            decay = jnp.exp2(m - m_new)
            return p.astype(q_ref.dtype), m_new, l * decay + p.sum(axis=1), decay

        def scores(s_ref):
            plgpu.wgmma(s_ref, q_smem.at[wg], k_smem.at[0].T)
            return s_ref[...]

        def body(step, carry):
            acc, p, m, l = carry
            slot, last = lax.rem(step, jnp.int32(stages)), lax.rem(step - 1, jnp.int32(stages))

            def products(refs):
                s_ref, o_ref, *results = refs
                plgpu.barrier_wait(k_full.at[slot])
                plgpu.barrier_wait(v_full.at[last])
                plgpu.barrier_wait(turn.at[wg])
                plgpu.wgmma(s_ref, q_smem.at[wg], k_smem.at[slot].T)
                plgpu.wgmma(o_ref, p, v_smem.at[last])
                plgpu.barrier_arrive(turn.at[1 - wg])
                s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                plgpu.barrier_arrive(k_free.at[slot])
                for ref, value in zip(results, softmax(step, s, m, l), strict=True):
                    ref[...] = value

            begin = (plgpu.ACC.init(empty((rows, block))), plgpu.ACC.init(acc), p, m, l, m)
            _, acc, p_new, m_new, l_new, decay = pl.run_state(products)(begin)
            plgpu.barrier_arrive(v_free.at[last])
            return acc * columns(decay, acc.shape), p_new, m_new, l_new

        @pl.when(wg == 1)
        def first_turn():
            plgpu.barrier_arrive(turn.at[0])

        m = plgpu.layout_cast(jnp.full((rows,), NO_MAXIMUM, jnp.float32), ROWS)
        l = plgpu.layout_cast(jnp.zeros((rows,), jnp.float32), ROWS)
        acc = empty((rows, q_ref.shape[-1]))
        plgpu.barrier_wait(k_full.at[0])
        s = pl.run_scoped(scores, plgpu.ACC((rows, block), jnp.float32))
        plgpu.barrier_arrive(k_free.at[0])
        p, m, l, _ = softmax(0, s, m, l)
        acc, p, m, l = lax.fori_loop(1, count, body, (acc, p, m, l))
        last = lax.rem(count - 1, jnp.int32(stages))
        plgpu.barrier_wait(v_full.at[last])
        acc = pl.run_state(lambda o_ref: plgpu.wgmma(o_ref, p, v_smem.at[last]))(plgpu.ACC.init(acc))
        plgpu.barrier_arrive(v_free.at[last])

        @pl.when(wg == 0)
        def last_turn():
            plgpu.barrier_wait(turn.at[0])

        seen = l > 0
        inverse = jnp.where(seen, 1 / jnp.where(seen, l, 1.0), 0.0)
        q_smem[wg] = (acc * columns(inverse, acc.shape)).astype(q_ref.dtype)
        lse_smem[wg] = jnp.where(seen, m * (1 / LOG2E) + jnp.log(jnp.where(seen, l, 1.0)), -jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem.at[wg], out_ref.at[b, run, head])
        plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_ref.at[b, head, run])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == tiles.warpgroups)
    def memory():
        plgpu.set_max_registers(tiles.registers[1], action="decrease")
        group = lax.div(head, jnp.int32(R))

        streams = ((k_ref, k_smem, k_full, k_free, 0), (v_ref, v_smem, v_full, v_free, 1))
        stream_blocks(streams, tiles, lo, count, lambda run: (b, run, group))


def forward(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    start_BS: jax.Array,
    *,
    offset: int = 0,
    tiles: Tiles = FORWARD,
) -> tuple[jax.Array, jax.Array]:
    """out_BSHK[b, i, h] = sum_j p_j v_BTGK[b, j, g] with p = softmax_j(q_BSHK[b, i, h] . k_BTGK[b, j, g] / sqrt(K)).

    g = h // (H / G), and j runs over start_BS[b, i] <= j <= min(i + offset, T - 1). Returns out_BSHK (dtype of q) and
    lse_BHS (float32), the natural logarithm of the softmax's denominator. A query that sees no key gives out = 0 and
    lse = -inf. bfloat16 or float16 inputs, K a multiple of 64; `start_BS` is int32 and does not decrease along S.
    Lengths that are not multiples of 8 cost a copy.
    """
    B, S, H, K = q_BSHK.shape
    T = k_BTGK.shape[1]
    bounds = key_bounds(start_BS, T, offset, tiles.tile, tiles.warpgroups, tiles.block)
    limits_B2S = limits(start_BS, T, offset, tiles.tile)
    q_BSHK, k_BTGK, v_BTGK = grown(q_BSHK, tiles.rows), grown(k_BTGK, tiles.block), grown(v_BTGK, tiles.block)
    stream = plgpu.SMEM((tiles.stages, tiles.block, K), q_BSHK.dtype, transforms=LAYOUT)
    kernel = launch(
        _kernel, "attention_forward", tiles, (B, bounds.shape[1], H), q_BSHK.shape, k_BTGK.shape,
        out_type=(
            jax.ShapeDtypeStruct(q_BSHK.shape, q_BSHK.dtype),
            jax.ShapeDtypeStruct((B, H, limits_B2S.shape[2]), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((tiles.warpgroups, tiles.rows, K), q_BSHK.dtype, transforms=LAYOUT),
            stream,
            stream,
            plgpu.SMEM((tiles.warpgroups, 2, tiles.rows), jnp.int32),
            plgpu.SMEM((tiles.warpgroups, tiles.block), jnp.int32),
            plgpu.SMEM((tiles.warpgroups, tiles.rows), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=tiles.warpgroups),
            plgpu.Barrier(num_barriers=tiles.stages),
            plgpu.Barrier(num_barriers=tiles.stages),
            plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=tiles.stages),
            plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=tiles.stages),
            plgpu.Barrier(num_barriers=tiles.warpgroups),
        ),
    )  # fmt: skip
    out_BSHK, lse_BHS = kernel(q_BSHK, k_BTGK, v_BTGK, limits_B2S, bounds)
    return out_BSHK[:, :S], lse_BHS[:, :, :S]
