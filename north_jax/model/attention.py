"""Grouped-query attention under a mask; which keys a query sees is decided once per forward pass.

Keys and values come head by head, k_GBTK and v_GBTK.
"""

import jax
import jax.numpy as jnp

# Finite, so that a query that sees nothing (a padding token of a cached step) yields a number and not NaN.
_HIDDEN = -1e30


def attend(q_BSHK: jax.Array, k_GBTK: jax.Array, v_GBTK: jax.Array, mask_BST: jax.Array) -> jax.Array:
    """softmax(q·k / sqrt(K)) v over the visible keys -> [B, S, H, K]; query head h reads key/value head h // (H / G).

    Scores and softmax are float32. `mask_BST` is True where a key is visible; its B may be 1.
    """
    B, S, H, K = q_BSHK.shape
    G, _, T, _ = k_GBTK.shape
    R = H // G
    # The R query heads of one key/value head are rows of one matrix: keys and values are never repeated.
    q_GBMK = (q_BSHK * K**-0.5).reshape(B, S, G, R, K).transpose(2, 0, 3, 1, 4).reshape(G, B, R * S, K)
    scores_GBMT = jnp.einsum("GBMK,GBTK->GBMT", q_GBMK, k_GBTK, preferred_element_type=jnp.float32)
    scores_GBRST = jnp.where(mask_BST[:, None], scores_GBMT.reshape(G, B, R, S, T), _HIDDEN)
    weights_GBMT = jax.nn.softmax(scores_GBRST, axis=-1).reshape(G, B, R * S, T).astype(v_GBTK.dtype)
    out_GBMK = jnp.einsum("GBMT,GBTK->GBMK", weights_GBMT, v_GBTK)
    return out_GBMK.reshape(G, B, R, S, K).transpose(1, 3, 0, 2, 4).reshape(B, S, H, K)


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
