"""Grouped-query attention within rows; which keys a query sees is decided once per forward pass."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.masked import attend


def row_masks(S: int, segment_ids_BS: jax.Array | None, window: int) -> tuple[jax.Array, jax.Array]:
    """(full, sliding) masks for `attend_rows`, [B or 1, S, S] each; the second may be in blocks, [B or 1, n, s, 2s].

    A key is visible when it is not later than the query, has its segment id and, sliding, is among the last `window`.
    Order and window go by the index in the row. Padding (segment 0) sees padding only, so no query is without a key.
    """
    if segment_ids_BS is None:
        segment_ids_BS = jnp.ones((1, S), jnp.int32)
    back_SS = jnp.arange(S)[:, None] - jnp.arange(S)
    full_BSS = (segment_ids_BS[:, :, None] == segment_ids_BS[:, None, :]) & (back_SS >= 0)
    # In blocks of s >= window - 1 tokens, a block sees itself and the one before: 2s keys per query instead of S.
    s = next((s for s in (window - 1, window) if s > 0 and S % s == 0 and 2 * s < S), None)
    if s is None:
        return full_BSS, full_BSS & (back_SS < window)
    blocks_Bns = segment_ids_BS.reshape(-1, S // s, s)
    back_st = jnp.arange(s)[:, None] - jnp.arange(-s, s)
    same_Bnst = blocks_Bns[:, :, :, None] == _with_previous(blocks_Bns, nothing=-1)[:, :, None, :]
    return full_BSS, same_Bnst & (back_st >= 0) & (back_st < window)


def attend_rows(q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention within rows -> [B, S, H, K], under one of the masks of `row_masks`."""
    B, S = q_BSHK.shape[:2]
    if mask.ndim == 4:  # blocks become rows
        n, s = mask.shape[1:3]

        def blocks(x):
            return x.reshape(B, n, s, *x.shape[2:])

        def merge(x):
            return x.reshape(B * n, *x.shape[2:])

        q_BSHK = merge(blocks(q_BSHK))
        k_BSGK, v_BSGK = merge(_with_previous(blocks(k_BSGK))), merge(_with_previous(blocks(v_BSGK)))
        mask = merge(jnp.broadcast_to(mask, (B, *mask.shape[1:])))
    out = attend(q_BSHK, k_BSGK.transpose(2, 0, 1, 3), v_BSGK.transpose(2, 0, 1, 3), mask)
    return out.reshape(B, S, *out.shape[2:])


def _with_previous(x_Bns: jax.Array, nothing: int = 0) -> jax.Array:
    """[B, n, s, …] -> [B, n, 2s, …]: every block preceded by the block before, the first one by `nothing`."""
    before = jnp.concatenate([jnp.full_like(x_Bns[:, :1], nothing), x_Bns[:, :-1]], axis=1)
    return jnp.concatenate([before, x_Bns], axis=2)
