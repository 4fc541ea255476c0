"""Backward attention on Hopper: one kernel for dq, one for dk and dv, each recomputing the probabilities.

With s = scale q . k, p = exp(s - lse), dp = do . v and delta = sum(do * out) - dlse:

    ds = p (dp - delta) scale    dq_i = sum_j ds_ij k_j    dk_j = sum_i ds_ij q_i    dv_j = sum_i p_ij do_i

No sum is spread over blocks of threads: the results are the same on every run, and memory is linear in the length. dk
and dv sum over the query heads of their key/value head inside the kernel. Compiled for H100 and H200, not run on
either: see `gpu.py`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.blocks import key_bounds, query_bounds
from pallas_kernels.attention.gpu_common import (
    COLUMNS,
    LAYOUT,
    LOG2E,
    ROWS,
    Tiles,
    columns,
    drain,
    grown,
    launch,
    limits,
    masked_scores,
    padded,
    store_places,
    stream_blocks,
    tile_bounds,
)  # fmt: skip
from pallas_kernels.versions import load

DQ = Tiles(rows=64, block=128, stages=2)
DKV = Tiles(rows=64, block=64, stages=4)


def key_tile_bounds(limits_B2S: jax.Array, T: int, tiles: Tiles) -> jax.Array:
    """Which blocks of queries see each tile of keys: int32 [B, tiles, 2 + 2 * warpgroups].

    As `tile_bounds`, seen from the keys: blocks lo <= n < hi hold every query that sees a key of the tile (none
    where lo = hi), then for the keys of each warpgroup the blocks all of whose queries see all of them.
    """
    start_BS, end_BS = limits_B2S[:, 0], limits_B2S[:, 1]
    count = pl.cdiv(T, tiles.tile)
    seen_BU2 = key_bounds(query_bounds(start_BS, end_BS, T, tiles.block, tiles.tile), count)[..., :2]
    per_warpgroup = query_bounds(start_BS, end_BS, T, tiles.block, tiles.rows)
    whole_BN2 = key_bounds(per_warpgroup, count * tiles.warpgroups)[..., 2:]
    return jnp.concatenate([seen_BU2, whole_BN2.reshape(*seen_BU2.shape[:2], 2 * tiles.warpgroups)], axis=-1)


def statistics(
    out_BSHK: jax.Array, lse_BHS: jax.Array, dout_BSHK: jax.Array, dlse_BHS: jax.Array, scale: float, tile: int
) -> jax.Array:
    """[B, H, 2, S grown to a multiple of tile] float32: -lse / scale and -delta, delta = sum(dout * out) - dlse.

    Both are what the accumulators of q . k and do . v start from. A query that sees nothing, or past the end, starts
    from -inf: its probabilities are zero whatever its scores.
    """
    delta_BHS = jnp.einsum("BSHK,BSHK->BHS", dout_BSHK, out_BSHK, preferred_element_type=jnp.float32) - dlse_BHS
    start_BHS = jnp.where(lse_BHS == -jnp.inf, -jnp.inf, -lse_BHS / scale)
    return jnp.stack(
        [padded(start_BHS, tile, constant_values=-jnp.inf), padded(-delta_BHS, tile, constant_values=0)], axis=2
    )


def _dq_kernel(
    q_ref, k_ref, v_ref, do_ref, stats_ref, limits_ref, bounds_ref, dq_ref,
    q_smem, do_smem, k_smem, v_smem, stats_smem, limits_smem, place_smem, q_full, k_full, v_full, k_free, v_free,
    *, tiles: Tiles, R: int, scale: float,
):  # fmt: skip
    rows, block, stages = tiles.rows, tiles.block, tiles.stages
    b, head = lax.axis_index("batch"), lax.axis_index("head")
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
        plgpu.copy_gmem_to_smem(do_ref.at[b, run, head], do_smem.at[wg], q_full.at[wg])
        plgpu.copy_gmem_to_smem(stats_ref.at[b, head, :, run], stats_smem.at[wg], q_full.at[wg])
        plgpu.copy_gmem_to_smem(limits_ref.at[b, :, run], limits_smem.at[wg], q_full.at[wg])
        store_places(place_smem.at[wg])
        whole_lo, whole_hi = bounds_ref[b, tile, 2 + 2 * wg], bounds_ref[b, tile, 3 + 2 * wg]
        plgpu.barrier_wait(q_full.at[wg])
        start, end = (load(limits_smem.at[wg, i], ROWS) for i in range(2))
        minus_lse = load(stats_smem.at[wg, 0], ROWS)
        minus_delta = load(stats_smem.at[wg, 1], ROWS)

        def body(step, dq):
            slot, n = lax.rem(step, jnp.int32(stages)), lo + step

            def products(refs):
                dq_ref, s_ref, dp_ref = refs
                plgpu.barrier_wait(k_full.at[slot])
                plgpu.wgmma(s_ref, q_smem.at[wg], k_smem.at[slot].T)
                plgpu.barrier_wait(v_full.at[slot])
                plgpu.wgmma(dp_ref, do_smem.at[wg], v_smem.at[slot].T)
                s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                s = lax.cond(
                    (n >= whole_lo) & (n < whole_hi),
                    lambda s: s,
                    lambda s: masked_scores(s, place_smem.at[wg], start - n * block, end - n * block),
                    s,
                )
                p = jnp.exp2(s * (scale * LOG2E))
                ds = p * plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
                plgpu.barrier_arrive(v_free.at[slot])
                plgpu.wgmma(dq_ref, ds.astype(q_ref.dtype), k_smem.at[slot])

            # The products start from -lse and -delta, which costs no registers beside them.
            begin = (dq, columns(minus_lse, (rows, block)), columns(minus_delta, (rows, block)))
            dq, _, _ = pl.run_state(products)(tuple(map(plgpu.ACC.init, begin)))
            plgpu.barrier_arrive(k_free.at[slot])
            return dq

        dq = plgpu.layout_cast(jnp.zeros((rows, q_ref.shape[-1]), jnp.float32), plgpu.Layout.WGMMA)
        dq = lax.fori_loop(0, count, body, dq)
        q_smem[wg] = (dq * scale).astype(q_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem.at[wg], dq_ref.at[b, run, head])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == tiles.warpgroups)
    def memory():
        plgpu.set_max_registers(tiles.registers[1], action="decrease")
        group = lax.div(head, jnp.int32(R))

        streams = ((k_ref, k_smem, k_full, k_free, 0), (v_ref, v_smem, v_full, v_free, 0))
        stream_blocks(streams, tiles, lo, count, lambda run: (b, run, group))


def _dkv_kernel(
    q_ref, k_ref, v_ref, do_ref, stats_ref, limits_ref, bounds_ref, dk_ref, dv_ref,
    k_smem, v_smem, q_smem, do_smem, stats_smem, limits_smem, kv_full, q_full, do_full, free,
    *, tiles: Tiles, R: int, scale: float,
):  # fmt: skip
    rows, block, stages = tiles.rows, tiles.block, tiles.stages
    # The first keys are seen by most queries: ascending tiles already start the long ones first.
    b, tile, group = lax.axis_index("batch"), lax.axis_index("tile"), lax.axis_index("head")
    wg = lax.axis_index("wg")
    lo = bounds_ref[b, tile, 0]
    blocks = bounds_ref[b, tile, 1] - lo
    count = blocks * R

    @pl.when(wg < tiles.warpgroups)
    def compute():
        plgpu.set_max_registers(tiles.registers[0], action="increase")
        first_key = tile * tiles.tile + wg * rows
        at = (b, pl.ds(first_key, rows), group)
        plgpu.copy_gmem_to_smem(k_ref.at[at], k_smem.at[wg], kv_full.at[wg])
        plgpu.copy_gmem_to_smem(v_ref.at[at], v_smem.at[wg], kv_full.at[wg])
        whole_lo, whole_hi = bounds_ref[b, tile, 2 + 2 * wg], bounds_ref[b, tile, 3 + 2 * wg]
        plgpu.barrier_wait(kv_full.at[wg])
        shape = (rows, block)
        key = plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=ROWS) + first_key

        def along(x: jax.Array) -> jax.Array:
            """One value per query, repeated along the keys."""
            return lax.broadcast_in_dim(x, shape, [1])

        def masked(s, slot):
            start, end = (along(load(limits_smem.at[slot, i], COLUMNS)) for i in range(2))
            return jnp.where((columns(key, shape) >= start) & (columns(key, shape) < end), s, -jnp.inf)

        def body(step, carry):
            slot, n = lax.rem(step, jnp.int32(stages)), lo + lax.rem(step, blocks)

            def products(refs):
                dk_ref, dv_ref, s_ref, dp_ref = refs
                plgpu.wgmma(s_ref, k_smem.at[wg], q_smem.at[slot].T)
                plgpu.barrier_wait(do_full.at[slot])
                plgpu.wgmma(dp_ref, v_smem.at[wg], do_smem.at[slot].T)
                s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                s = lax.cond((n >= whole_lo) & (n < whole_hi), lambda s: s, lambda s: masked(s, slot), s)
                p = jnp.exp2(s * (scale * LOG2E))
                plgpu.wgmma(dv_ref, p.astype(q_ref.dtype), do_smem.at[slot])
                ds = p * plgpu.wgmma_accumulator_load(dp_ref, wait_n=1)
                plgpu.wgmma(dk_ref, ds.astype(q_ref.dtype), q_smem.at[slot])

            plgpu.barrier_wait(q_full.at[slot])
            # The products start from -lse and -delta, which costs no registers beside them.
            begin = (*carry, *(along(load(stats_smem.at[slot, i], COLUMNS)) for i in range(2)))
            dk, dv, _, _ = pl.run_state(products)(tuple(map(plgpu.ACC.init, begin)))
            plgpu.barrier_arrive(free.at[slot])
            return dk, dv

        zeros = plgpu.layout_cast(jnp.zeros((rows, q_ref.shape[-1]), jnp.float32), plgpu.Layout.WGMMA)
        dk, dv = lax.fori_loop(0, count, body, (zeros, zeros))
        k_smem[wg] = (dk * scale).astype(q_ref.dtype)
        v_smem[wg] = dv.astype(q_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_smem.at[wg], dk_ref.at[at])
        plgpu.copy_smem_to_gmem(v_smem.at[wg], dv_ref.at[at])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == tiles.warpgroups)
    def memory():
        plgpu.set_max_registers(tiles.registers[1], action="decrease")

        @pl.loop(0, count)
        def fetch(step):
            slot = lax.rem(step, jnp.int32(stages))
            head = group * R + lax.div(step, blocks)
            run = pl.ds((lo + lax.rem(step, blocks)) * block, block)

            @pl.when(step >= stages)
            def wait():
                plgpu.barrier_wait(free.at[slot])

            plgpu.copy_gmem_to_smem(q_ref.at[b, run, head], q_smem.at[slot], q_full.at[slot])
            plgpu.copy_gmem_to_smem(stats_ref.at[b, head, :, run], stats_smem.at[slot], q_full.at[slot])
            plgpu.copy_gmem_to_smem(limits_ref.at[b, :, run], limits_smem.at[slot], q_full.at[slot])
            plgpu.copy_gmem_to_smem(do_ref.at[b, run, head], do_smem.at[slot], do_full.at[slot])

        drain([free], stages, count)


def dq(
    q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, dout_BSHK: jax.Array,
    stats_BH2S: jax.Array, start_BS: jax.Array, end_BS: jax.Array, scale: float, *, tiles: Tiles = DQ,
) -> jax.Array:  # fmt: skip
    """dq_BSHK of `gpu.forward`; stats_BH2S from `statistics`, with a tile that is a multiple of `tiles.tile`."""
    B, S, H, K = q_BSHK.shape
    T = k_BTGK.shape[1]
    limits_B2S = limits(start_BS, end_BS, T, tiles.tile)
    bounds = tile_bounds(limits_B2S, T, tiles)
    q_BSHK, dout_BSHK = grown(q_BSHK, tiles.rows), grown(dout_BSHK, tiles.rows)
    k_BTGK, v_BTGK = grown(k_BTGK, tiles.block), grown(v_BTGK, tiles.block)
    held = plgpu.SMEM((tiles.warpgroups, tiles.rows, K), q_BSHK.dtype, transforms=LAYOUT)
    stream = plgpu.SMEM((tiles.stages, tiles.block, K), q_BSHK.dtype, transforms=LAYOUT)
    full = plgpu.Barrier(num_barriers=tiles.stages)
    free = plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=tiles.stages)
    dq_BSHK = launch(
        _dq_kernel, "attention_dq", tiles, scale, (B, bounds.shape[1], H), q_BSHK.shape, k_BTGK.shape,
        out_type=jax.ShapeDtypeStruct(q_BSHK.shape, q_BSHK.dtype),
        scratch_types=(
            held, held, stream, stream,
            plgpu.SMEM((tiles.warpgroups, 2, tiles.rows), jnp.float32),
            plgpu.SMEM((tiles.warpgroups, 2, tiles.rows), jnp.int32),
            plgpu.SMEM((tiles.warpgroups, tiles.block), jnp.int32),
            plgpu.Barrier(num_arrivals=4, num_barriers=tiles.warpgroups),
            full, full, free, free,
        ),
    )(q_BSHK, k_BTGK, v_BTGK, dout_BSHK, stats_BH2S, limits_B2S, bounds)  # fmt: skip
    return dq_BSHK[:, :S]


def dkv(
    q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, dout_BSHK: jax.Array,
    stats_BH2S: jax.Array, start_BS: jax.Array, end_BS: jax.Array, scale: float, *, tiles: Tiles = DKV,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """dk_BTGK and dv_BTGK of `gpu.forward`; stats_BH2S as for `dq`, with a multiple of `tiles.block`."""
    B, K = q_BSHK.shape[0], q_BSHK.shape[3]
    T, G = k_BTGK.shape[1:3]
    limits_B2S = limits(start_BS, end_BS, T, tiles.block)
    bounds = key_tile_bounds(limits_B2S, T, tiles)
    q_BSHK, dout_BSHK = grown(q_BSHK, tiles.block), grown(dout_BSHK, tiles.block)
    k_BTGK, v_BTGK = grown(k_BTGK, tiles.rows), grown(v_BTGK, tiles.rows)
    held = plgpu.SMEM((tiles.warpgroups, tiles.rows, K), q_BSHK.dtype, transforms=LAYOUT)
    stream = plgpu.SMEM((tiles.stages, tiles.block, K), q_BSHK.dtype, transforms=LAYOUT)
    result = jax.ShapeDtypeStruct(k_BTGK.shape, k_BTGK.dtype)
    dk_BTGK, dv_BTGK = launch(
        _dkv_kernel, "attention_dkv", tiles, scale, (B, bounds.shape[1], G), q_BSHK.shape, k_BTGK.shape,
        out_type=(result, result),
        scratch_types=(
            held, held, stream, stream,
            plgpu.SMEM((tiles.stages, 2, tiles.block), jnp.float32),
            plgpu.SMEM((tiles.stages, 2, tiles.block), jnp.int32),
            plgpu.Barrier(num_arrivals=2, num_barriers=tiles.warpgroups),
            plgpu.Barrier(num_arrivals=3, num_barriers=tiles.stages),
            plgpu.Barrier(num_barriers=tiles.stages),
            plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=tiles.stages),
        ),
    )(q_BSHK, k_BTGK, v_BTGK, dout_BSHK, stats_BH2S, limits_B2S, bounds)  # fmt: skip
    return dk_BTGK[:, :T], dv_BTGK[:, :T]


def backward(
    q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, start_BS: jax.Array, end_BS: jax.Array,
    out_BSHK: jax.Array, lse_BHS: jax.Array, dout_BSHK: jax.Array, dlse_BHS: jax.Array,
    *, scale: float, dq_tiles: Tiles = DQ, dkv_tiles: Tiles = DKV,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """(dq_BSHK, dk_BTGK, dv_BTGK) of `gpu.forward` from its arguments, its results and the gradients of both."""
    tile = max(dq_tiles.tile, dkv_tiles.block)
    stats_BH2S = statistics(out_BSHK, lse_BHS, dout_BSHK, dlse_BHS, scale, tile)
    arguments = (q_BSHK, k_BTGK, v_BTGK, dout_BSHK.astype(q_BSHK.dtype), stats_BH2S, start_BS, end_BS, scale)
    dk_BTGK, dv_BTGK = dkv(*arguments, tiles=dkv_tiles)
    return dq(*arguments, tiles=dq_tiles), dk_BTGK, dv_BTGK
