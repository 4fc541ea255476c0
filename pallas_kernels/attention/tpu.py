"""Flash attention for TPUs (Mosaic), forward; `tpu_backward.py` has the gradients.

One grid step holds a block of queries of all heads that share a key/value head. It walks over the key blocks that any
of these queries sees, and over no others; the next block is on its way while this one is used. Blocks that all queries
see whole go without a mask. Source: Dao, FlashAttention-2 (2023), for the running softmax.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.blocks import query_bounds
from pallas_kernels.attention.rule import differentiable
from pallas_kernels.attention.tpu_backward import backward
from pallas_kernels.attention.tpu_common import (
    FLOOR,
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
    lanes,
    padded,
    seen,
    walk,
    whole_or_masked,
    widen,
)


def _forward_kernel(
    bounds, q_ref, start_ref, end_ref, k_hbm, v_hbm, out_ref, lse_ref, k_buf, v_buf, arrived, m_ref, l_ref, acc_ref,
    start_QL, end_QL, *, tiles: Tiles, scale: float,
):  # fmt: skip
    b, g, i = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    R, _, K = acc_ref.shape
    first, end, full_first, full_end = (bounds[4 * (b * pl.num_programs(2) + i) + n] for n in range(4))
    m_ref[...] = jnp.full_like(m_ref, FLOOR)
    l_ref[...] = jnp.zeros_like(l_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)
    start_QL[...], end_QL[...] = as_columns(start_ref[0]), as_columns(end_ref[0])

    def attend(h, j, slot, masked: bool):
        for c in range(tiles.k // tiles.compute):
            keys = pl.ds(c * tiles.compute, tiles.compute)
            s_QT = dot(q_ref[0, :, lanes(h, K)], k_buf[slot, keys, :], ROWS_BY_ROWS)
            if masked:
                start, end = (widen(ref[...], tiles.compute) for ref in (start_QL, end_QL))
                key = j * tiles.k + c * tiles.compute
                s_QT = jnp.where(seen(start, end, key, s_QT.shape, 1), s_QT, HIDDEN)
            before_QL = m_ref[h]
            m_QL = jnp.maximum(before_QL, jnp.max(s_QT, axis=1, keepdims=True))
            p_QT = jnp.exp2((s_QT - widen(m_QL, tiles.compute)) * (scale * LOG2E))
            fade_QL = jnp.exp2((before_QL - m_QL) * (scale * LOG2E))
            m_ref[h] = m_QL
            # Sums stay apart per lane until the end.
            parts = jnp.split(p_QT, tiles.compute // LANES, axis=1)
            l_ref[h] = fade_QL * l_ref[h] + functools.reduce(jnp.add, parts)
            new_QK = dot(p_QT.astype(v_buf.dtype), v_buf[slot, keys, :], ROWS_BY_COLUMNS)
            acc_ref[h] = widen(fade_QL, K) * acc_ref[h] + new_QK

    def use(j, slot):
        whole = (full_first <= j) & (j < full_end)
        whole_or_masked(whole, lambda masked: each_head(R, lambda h: attend(h, j, slot, masked)))

    walk(first, end, fetch_keys(b, g, tiles, (k_hbm, v_hbm), (k_buf, v_buf), arrived), use)

    def finish(h):
        l_Q1 = jnp.sum(l_ref[h], axis=1, keepdims=True)
        some_Q1 = l_Q1 > 0
        safe_Q1 = jnp.where(some_Q1, l_Q1, 1.0)
        out_ref[0, :, lanes(h, K)] = (acc_ref[h] / safe_Q1).astype(out_ref.dtype)
        lse_QL = jnp.where(some_Q1, m_ref[h] * scale + jnp.log(safe_Q1), -jnp.inf)
        lse_ref[0, 0, pl.ds(h, 1), :] = lse_QL.T[:1]

    each_head(R, finish)


def forward(
    q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, *, scale: float, tiles: Tiles = Tiles(), interpret=False  # noqa: B008
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """(out_BSHK, lse_BHS) of `api.attention`."""
    length = q_BSHK.shape[1]
    q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, tiles = padded(q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, tiles)
    B, S, H, K = q_BSHK.shape
    T, G = k_BTGK.shape[1:3]
    R, nq = H // G, S // tiles.q
    bounds = query_bounds(start_BS, end_BS, T, tiles.q, tiles.k).reshape(-1)

    def rows(b, g, i, *_):
        return b, i, g

    spans = pl.BlockSpec((1, 1, tiles.q), lambda b, g, i, *_: (b, 0, i))
    out, lse_BGRS = pl.pallas_call(
        functools.partial(_forward_kernel, tiles=tiles, scale=scale),
        name="attention_forward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, G, nq),
            in_specs=[
                pl.BlockSpec((1, tiles.q, R * K), rows),
                spans,
                spans,
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[
                pl.BlockSpec((1, tiles.q, R * K), rows),
                pl.BlockSpec((1, 1, R, tiles.q), lambda b, g, i, *_: (b, g, 0, i)),
            ],
            scratch_shapes=[
                pltpu.VMEM((2, tiles.k, K), k_BTGK.dtype),
                pltpu.VMEM((2, tiles.k, K), v_BTGK.dtype),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.VMEM((R, tiles.q, LANES), jnp.float32),
                pltpu.VMEM((R, tiles.q, LANES), jnp.float32),
                pltpu.VMEM((R, tiles.q, K), jnp.float32),
                pltpu.VMEM((tiles.q, LANES), jnp.int32),
                pltpu.VMEM((tiles.q, LANES), jnp.int32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((B, S, H * K), q_BSHK.dtype),
            jax.ShapeDtypeStruct((B, G, R, S), jnp.float32),
        ],
        # Of a causal call; what documents and windows leave out is not known when it is traced.
        cost_estimate=pl.CostEstimate(
            flops=2 * B * H * S * T * K,
            transcendentals=B * H * S * T // 2,
            bytes_accessed=2 * q_BSHK.nbytes + 2 * k_BTGK.nbytes * nq // 2,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel"), vmem_limit_bytes=tiles.vmem_bytes
        ),
        interpret=interpret,
    )(
        bounds,
        q_BSHK.reshape(B, S, H * K),
        start_BS[:, None],
        end_BS[:, None],
        k_BTGK.reshape(B, T, G * K),
        v_BTGK.reshape(B, T, G * K),
    )
    return out.reshape(B, S, H, K)[:, :length], lse_BGRS.reshape(B, H, S)[:, :, :length]


def takes(q_BSHK: jax.Array) -> bool:
    """Whether the kernels have tiles for it."""
    return q_BSHK.shape[3] % LANES == 0


def attention(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    start_BS: jax.Array,
    end_BS: jax.Array,
    scale: float,
    *,
    tiles: Tiles = Tiles(),  # noqa: B008
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.attention`. `interpret` as in `pl.pallas_call`."""
    if not takes(q_BSHK):
        raise ValueError(
            f"attention: the tpu backend takes heads whose width divides by {LANES}, not {q_BSHK.shape[3]}"
        )
    how = {"scale": scale, "tiles": tiles, "interpret": interpret}
    both = differentiable(functools.partial(forward, **how), functools.partial(backward, **how))
    return both(q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS)
