"""Gradients of flash attention for TPUs: one kernel for dq, one for dk and dv. Memory is linear in S, and every sum is
taken in a fixed order.

With p = exp(s - lse), dp = do v^T and delta = Σ do · out - dlse (all per query): ds = p (dp - delta), dq = scale ds k,
dk = scale ds^T q, dv = p^T do. Source: Dao, FlashAttention-2 (2023).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.blocks import key_bounds, query_bounds
from pallas_kernels.attention.tpu_common import (
    HIDDEN,
    LANES,
    LOG2E,
    ROWS_BY_COLUMNS,
    ROWS_BY_ROWS,
    Tiles,
    as_columns,
    dot,
    each_head,
    fetch_keys,
    grown,
    lanes,
    padded,
    seen,
    walk,
    whole_or_masked,
    widen,
)


def _dq_kernel(
    bounds, q_ref, do_ref, lse_ref, delta_ref, start_ref, end_ref, k_hbm, v_hbm, dq_ref,
    k_buf, v_buf, arrived, lse_QL, delta_QL, start_QL, end_QL, acc_ref, *, tiles: Tiles, scale: float,
):  # fmt: skip
    b, g, i = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    R, _, K = acc_ref.shape
    first, end, full_first, full_end = (bounds[4 * (b * pl.num_programs(2) + i) + n] for n in range(4))
    acc_ref[...] = jnp.zeros_like(acc_ref)
    start_QL[...], end_QL[...] = as_columns(start_ref[0]), as_columns(end_ref[0])

    def columns(h):
        lse_QL[h] = as_columns(lse_ref[0, 0, pl.ds(h, 1), :])
        delta_QL[h] = as_columns(delta_ref[0, 0, pl.ds(h, 1), :])

    each_head(R, columns)

    def differentiate(h, j, slot, masked: bool):
        for c in range(tiles.k // tiles.compute):
            keys = pl.ds(c * tiles.compute, tiles.compute)
            s_QT = dot(q_ref[0, :, lanes(h, K)], k_buf[slot, keys, :], ROWS_BY_ROWS) * (scale * LOG2E)
            if masked:
                start, end = (widen(ref[...], tiles.compute) for ref in (start_QL, end_QL))
                key = j * tiles.k + c * tiles.compute
                s_QT = jnp.where(seen(start, end, key, s_QT.shape, 1), s_QT, HIDDEN)
            p_QT = jnp.exp2(s_QT - widen(lse_QL[h], tiles.compute))
            dp_QT = dot(do_ref[0, :, lanes(h, K)], v_buf[slot, keys, :], ROWS_BY_ROWS)
            ds_QT = p_QT * (dp_QT - widen(delta_QL[h], tiles.compute))
            acc_ref[h] += dot(ds_QT.astype(k_buf.dtype), k_buf[slot, keys, :], ROWS_BY_COLUMNS)

    def use(j, slot):
        whole = (full_first <= j) & (j < full_end)
        whole_or_masked(whole, lambda masked: each_head(R, lambda h: differentiate(h, j, slot, masked)))

    walk(first, end, fetch_keys(b, g, tiles, (k_hbm, v_hbm), (k_buf, v_buf), arrived), use)

    def finish(h):
        dq_ref[0, :, lanes(h, K)] = (acc_ref[h] * scale).astype(dq_ref.dtype)

    each_head(R, finish)


def _dkv_kernel(
    bounds, k_ref, v_ref, q_hbm, do_hbm, lse_hbm, delta_hbm, start_hbm, end_hbm, dk_ref, dv_ref,
    q_buf, do_buf, lse_buf, delta_buf, start_buf, end_buf, arrived, dk_acc, dv_acc, *, tiles: Tiles, scale: float,
):  # fmt: skip
    b, g, j = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    R, K = lse_buf.shape[1], dk_acc.shape[-1]
    first, end, full_first, full_end = (bounds[4 * (b * pl.num_programs(2) + j) + n] for n in range(4))
    dk_acc[...] = jnp.zeros_like(dk_acc)
    dv_acc[...] = jnp.zeros_like(dv_acc)

    def copies(i, slot):
        queries = pl.ds(pl.multiple_of(i * tiles.q, tiles.q), tiles.q)
        arrays = (
            (q_hbm.at[b, queries, lanes(g, R * K)], q_buf),
            (do_hbm.at[b, queries, lanes(g, R * K)], do_buf),
            (lse_hbm.at[b, g, :, queries], lse_buf),
            (delta_hbm.at[b, g, :, queries], delta_buf),
            (start_hbm.at[b, :, queries], start_buf),
            (end_hbm.at[b, :, queries], end_buf),
        )
        return [pltpu.make_async_copy(hbm, buf.at[slot], arrived.at[slot, n]) for n, (hbm, buf) in enumerate(arrays)]

    def differentiate(h, slot, masked: bool):
        # Keys along rows here: what belongs to a query is then a row, and no product needs a transpose.
        for c in range(tiles.q // tiles.compute):
            queries = pl.ds(c * tiles.compute, tiles.compute)
            q_QK, do_QK = q_buf[slot, queries, lanes(h, K)], do_buf[slot, queries, lanes(h, K)]
            s_TQ = dot(k_ref[0], q_QK, ROWS_BY_ROWS) * (scale * LOG2E)
            if masked:
                # Counted from the block's first key: a subtraction a query instead of an addition a pair.
                start, end = (buf[slot, :, queries] - j * tiles.k for buf in (start_buf, end_buf))
                s_TQ = jnp.where(seen(start, end, 0, s_TQ.shape, 0), s_TQ, HIDDEN)
            p_TQ = jnp.exp2(s_TQ - lse_buf[slot, pl.ds(h, 1), queries])
            dv_acc[...] += dot(p_TQ.astype(do_QK.dtype), do_QK, ROWS_BY_COLUMNS)
            dp_TQ = dot(v_ref[0], do_QK, ROWS_BY_ROWS)
            ds_TQ = p_TQ * (dp_TQ - delta_buf[slot, pl.ds(h, 1), queries])
            dk_acc[...] += dot(ds_TQ.astype(q_QK.dtype), q_QK, ROWS_BY_COLUMNS)

    def use(i, slot):
        whole = (full_first <= i) & (i < full_end)
        whole_or_masked(whole, lambda masked: each_head(R, lambda h: differentiate(h, slot, masked)))

    walk(first, end, copies, use)
    dk_ref[0] = (dk_acc[...] * scale).astype(dk_ref.dtype)
    dv_ref[0] = dv_acc[...].astype(dv_ref.dtype)


def backward(
    q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, out_BSHK, lse_BHS, dout_BSHK, dlse_BHS,
    *, scale: float, tiles: Tiles = Tiles(), interpret=False,  # noqa: B008
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """(dq_BSHK, dk_BTGK, dv_BTGK) from what the forward pass saw and gave, and the gradients of its two outputs."""
    S, T = q_BSHK.shape[1], k_BTGK.shape[1]
    delta_BSH = jnp.einsum("BSHK,BSHK->BSH", dout_BSHK, out_BSHK, preferred_element_type=jnp.float32)
    delta_BSH -= dlse_BHS.transpose(0, 2, 1)
    # A query without keys has weights 0: exp2(s - huge).
    lse2_BSH = jnp.where(jnp.isneginf(lse_BHS), -HIDDEN, lse_BHS * LOG2E).transpose(0, 2, 1)
    q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, tiles = padded(q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, tiles)
    per_query = (dout_BSHK.astype(q_BSHK.dtype), delta_BSH, lse2_BSH)
    dq_BSHK, dk_BTGK, dv_BTGK = _gradients(
        q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, *(grown(x, tiles.q) for x in per_query), scale, tiles, interpret
    )
    return dq_BSHK[:, :S], dk_BTGK[:, :T], dv_BTGK[:, :T]


def _gradients(
    q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, dout_BSHK, delta_BSH, lse2_BSH, scale, tiles: Tiles, interpret
):  # fmt: skip
    """`backward` on arrays whose lengths the tiles divide."""
    B, S, H, K = q_BSHK.shape
    T, G = k_BTGK.shape[1:3]
    R, nq, nk = H // G, S // tiles.q, T // tiles.k
    delta_BGRS, lse_BGRS = (x_BSH.transpose(0, 2, 1).reshape(B, G, R, S) for x_BSH in (delta_BSH, lse2_BSH))
    bounds = query_bounds(start_BS, end_BS, T, tiles.q, tiles.k)
    q_BSX, do_BSX = q_BSHK.reshape(B, S, H * K), dout_BSHK.reshape(B, S, H * K)
    k_BTX, v_BTX = k_BTGK.reshape(B, T, G * K), v_BTGK.reshape(B, T, G * K)
    start_B1S, end_B1S = start_BS[:, None], end_BS[:, None]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)

    def call(kernel, name: str, products: int, **kwargs):
        return functools.partial(
            pl.pallas_call,
            kernel,
            name=name,
            cost_estimate=pl.CostEstimate(  # of a causal call
                flops=products * B * H * S * T * K,
                transcendentals=B * H * S * T // 2,
                bytes_accessed=3 * q_BSHK.nbytes + 4 * k_BTGK.nbytes,
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "parallel"), vmem_limit_bytes=tiles.vmem_bytes
            ),
            interpret=interpret,
            **kwargs,
        )

    def wide(b, g, i, *_):
        return b, i, g

    queries = pl.BlockSpec((1, tiles.q, R * K), wide)
    per_query = pl.BlockSpec((1, 1, R, tiles.q), lambda b, g, i, *_: (b, g, 0, i))
    span = pl.BlockSpec((1, 1, tiles.q), lambda b, g, i, *_: (b, 0, i))
    dq_BSX = call(
        functools.partial(_dq_kernel, tiles=tiles, scale=scale),
        "attention_dq",
        3,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, G, nq),
            in_specs=[queries, queries, per_query, per_query, span, span, anywhere, anywhere],
            out_specs=queries,
            scratch_shapes=[
                pltpu.VMEM((2, tiles.k, K), k_BTGK.dtype),
                pltpu.VMEM((2, tiles.k, K), v_BTGK.dtype),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.VMEM((R, tiles.q, LANES), jnp.float32),
                pltpu.VMEM((R, tiles.q, LANES), jnp.float32),
                pltpu.VMEM((tiles.q, LANES), jnp.int32),
                pltpu.VMEM((tiles.q, LANES), jnp.int32),
                pltpu.VMEM((R, tiles.q, K), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q_BSX.shape, q_BSHK.dtype),
    )()(bounds.reshape(-1), q_BSX, do_BSX, lse_BGRS, delta_BGRS, start_B1S, end_B1S, k_BTX, v_BTX)

    keys = pl.BlockSpec((1, tiles.k, K), wide)
    dk_BTX, dv_BTX = call(
        functools.partial(_dkv_kernel, tiles=tiles, scale=scale),
        "attention_dkv",
        4,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, G, nk),
            in_specs=[keys, keys] + [anywhere] * 6,
            out_specs=[keys, keys],
            scratch_shapes=[
                pltpu.VMEM((2, tiles.q, R * K), q_BSHK.dtype),
                pltpu.VMEM((2, tiles.q, R * K), q_BSHK.dtype),
                pltpu.VMEM((2, R, tiles.q), jnp.float32),
                pltpu.VMEM((2, R, tiles.q), jnp.float32),
                pltpu.VMEM((2, 1, tiles.q), jnp.int32),
                pltpu.VMEM((2, 1, tiles.q), jnp.int32),
                pltpu.SemaphoreType.DMA((2, 6)),
                pltpu.VMEM((tiles.k, K), jnp.float32),
                pltpu.VMEM((tiles.k, K), jnp.float32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_BTX, v_BTX)],
    )()(
        key_bounds(bounds, nk).reshape(-1),
        *(k_BTX, v_BTX, q_BSX, do_BSX, lse_BGRS, delta_BGRS, start_B1S, end_B1S),
    )
    return dq_BSX.reshape(q_BSHK.shape), dk_BTX.reshape(k_BTGK.shape), dv_BTX.reshape(v_BTGK.shape)
