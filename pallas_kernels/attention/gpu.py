"""Forward attention on Hopper: Pallas Mosaic GPU, one memory warpgroup feeding compute warpgroups.

A tile of queries fetches one run of key blocks, from the first that any of its spans touches to the last, and masks
those of them that some of its queries do not see whole.

Schedule (FlashAttention-3's): the product Q K^T of the next block is in flight with P V of the last one while the
softmax of this one runs, and the two compute warpgroups take turns at the tensor cores.

The kernels are compiled for H100 and H200 without spills and have not been run on either: nothing is known about
their speed. The tests run them on small shapes in an extension of jax's interpreter, races included, and check their
block loops in plain numpy with the bounds of this file.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.gpu_backward import backward
from pallas_kernels.attention.gpu_common import (
    LAYOUT,
    LOG2E,
    ROWS,
    Tiles,
    columns,
    empty,
    grown,
    launch,
    limits,
    masked_scores,
    store_places,
    stream_blocks,
    tile_bounds,
)
from pallas_kernels.attention.rule import differentiable
from pallas_kernels.versions import load

FORWARD = Tiles()
# The running maximum starts at a finite value, so that rows without a visible key yet give exp2(-inf), never inf - inf.
NO_MAXIMUM = -1e30


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
        start, end = (load(limits_smem.at[wg, i], ROWS) for i in range(2))

        def softmax(step, s, m, l):
            n = lo + step
            s = lax.cond(
                (n >= whole_lo) & (n < whole_hi),
                lambda s: s,
                lambda s: masked_scores(s, place_smem.at[wg], start - n * block, end - n * block),
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
    q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, *, scale: float, tiles: Tiles = FORWARD
) -> tuple[jax.Array, jax.Array]:
    """(out_BSHK, lse_BHS) of `api.attention`."""
    B, S, H, K = q_BSHK.shape
    T = k_BTGK.shape[1]
    limits_B2S = limits(start_BS, end_BS, T, tiles.tile)
    bounds = tile_bounds(limits_B2S, T, tiles)
    q_BSHK, k_BTGK, v_BTGK = grown(q_BSHK, tiles.rows), grown(k_BTGK, tiles.block), grown(v_BTGK, tiles.block)
    stream = plgpu.SMEM((tiles.stages, tiles.block, K), q_BSHK.dtype, transforms=LAYOUT)
    kernel = launch(
        _kernel, "attention_forward", tiles, scale, (B, bounds.shape[1], H), q_BSHK.shape, k_BTGK.shape,
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


def takes(q_BSHK: jax.Array) -> bool:
    """Whether the kernels have tiles for it: the tensor cores round float32 too much for the scores."""
    return q_BSHK.dtype in (jnp.bfloat16, jnp.float16) and q_BSHK.shape[3] % 64 == 0


def attention(
    q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, start_BS: jax.Array, end_BS: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.attention`. Lengths that are not multiples of 8 cost a copy."""
    if not takes(q_BSHK):
        raise ValueError(
            "attention: the gpu backend takes bfloat16 or float16 heads whose width divides by 64, not"
            f" {q_BSHK.dtype} of {q_BSHK.shape[3]}"
        )
    both = differentiable(functools.partial(forward, scale=scale), functools.partial(backward, scale=scale))
    return both(q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS)
