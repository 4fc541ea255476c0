"""What the Hopper kernels of attention share: tiles, the blocks each of them sees, masks, the memory warpgroup."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.blocks import query_bounds
from pallas_kernels.versions import load

LOG2E = math.log2(math.e)
# wgmma reads rows of 128 bytes, swizzled, in groups of eight.
LAYOUT = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
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


def tile_bounds(limits_B2S: jax.Array, T: int, tiles: Tiles) -> jax.Array:
    """Which blocks of keys each tile of queries sees: int32 [B, tiles, 2 + 2 * warpgroups].

    Blocks lo <= n < hi hold every key that the tile sees (one is named even where nothing is seen: the kernels begin
    with it). Then, for the queries of each warpgroup, the blocks lo <= n < hi that all of them see wholly.
    """
    start_BS, end_BS = limits_B2S[:, 0], limits_B2S[:, 1]
    seen_BU4 = query_bounds(start_BS, end_BS, T, tiles.tile, tiles.block)
    lo_BU = jnp.minimum(seen_BU4[..., 0], pl.cdiv(T, tiles.block) - 1)
    hi_BU = jnp.maximum(seen_BU4[..., 1], lo_BU + 1)
    whole_BN2 = query_bounds(start_BS, end_BS, T, tiles.rows, tiles.block)[..., 2:]
    whole_BUX = whole_BN2.reshape(*lo_BU.shape, 2 * tiles.warpgroups)
    return jnp.concatenate([jnp.stack([lo_BU, hi_BU], axis=-1), whole_BUX], axis=-1)


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


def limits(start_BS: jax.Array, end_BS: jax.Array, T: int, tile: int) -> jax.Array:
    """[B, 2, S grown to a multiple of tile] int32: the spans, ending at most at T. Past S, copies of the last one."""
    return padded(jnp.stack([start_BS, jnp.minimum(end_BS, T)], axis=1), tile)


def store_places(place_smem) -> None:
    """Fills place_smem with 0, 1, 2, …

    Column numbers come from shared memory because the compiler would compute an iota once, before the loop, and hold
    one register per column through it: the backward kernels would spill.
    """
    place_smem[...] = plgpu.broadcasted_iota(jnp.int32, place_smem.shape, 0, layout=COLUMNS)


def masked_scores(s: jax.Array, place_smem, start: jax.Array, end: jax.Array) -> jax.Array:
    """s with -inf where a column's place is not within its row's `start` and `end`, half-open."""
    place = lax.broadcast_in_dim(load(place_smem, COLUMNS), s.shape, [1])
    return jnp.where((place >= columns(start, s.shape)) & (place < columns(end, s.shape)), s, -jnp.inf)


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


def launch(kernel, name: str, tiles: Tiles, scale: float, grid, q_shape, k_shape, **types):
    """The kernel over (batch, tile, head), a memory warpgroup beside the others of `tiles`.

    Heads vary fastest: the query heads of one key/value head run side by side and share its blocks in L2.
    """
    return plgpu.kernel(
        functools.partial(kernel, tiles=tiles, R=q_shape[2] // k_shape[2], scale=scale),
        **types,
        grid=grid,
        grid_names=("batch", "tile", "head"),
        num_threads=tiles.warpgroups + 1,
        thread_name="wg",
        kernel_name=name,
        compiler_params=COMPILER,
    )
