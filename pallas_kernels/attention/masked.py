"""Grouped-query attention under a mask, in plain jnp: every score at once."""

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
