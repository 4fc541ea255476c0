"""The definition in plain jnp: every row's pages gathered to one piece, then attention under a mask.

What every platform has, and what a mesh may split by heads.
"""

import jax
import jax.numpy as jnp

# Finite, so that a query that sees nothing (a padding token of a step) yields a number and not NaN.
_HIDDEN = -1e30


def paged_attention(
    q_BSHK: jax.Array,
    k_GXPK: jax.Array,
    v_GXPK: jax.Array,
    table_BW: jax.Array,
    start_BS: jax.Array,
    end_BS: jax.Array,
) -> jax.Array:
    """See `api.paged_attention`. A query without keys gets the mean of all values in its table, not 0.

    Scores and softmax are float32.
    """
    B, S, H, K = q_BSHK.shape
    G = k_GXPK.shape[0]
    T = table_BW.shape[1] * k_GXPK.shape[2]

    def gather(pages_GXPK: jax.Array) -> jax.Array:
        return pages_GXPK[:, table_BW].reshape(G, B, T, K).astype(q_BSHK.dtype)

    k_GBTK, v_GBTK = gather(k_GXPK), gather(v_GXPK)
    # The query heads of one key/value head are rows of one matrix: keys and values are never repeated.
    q_GBMK = (q_BSHK * K**-0.5).reshape(B, S, G, H // G, K).transpose(2, 0, 3, 1, 4).reshape(G, B, -1, K)
    scores_GBMT = jnp.einsum("GBMK,GBTK->GBMT", q_GBMK, k_GBTK, preferred_element_type=jnp.float32)
    key_T = jnp.arange(T)
    seen_BST = (key_T >= start_BS[:, :, None]) & (key_T < end_BS[:, :, None])
    scores_GBRST = jnp.where(seen_BST[:, None], scores_GBMT.reshape(G, B, H // G, S, T), _HIDDEN)
    weights_GBMT = jax.nn.softmax(scores_GBRST, axis=-1).reshape(G, B, -1, T).astype(v_GBTK.dtype)
    out_GBMK = jnp.einsum("GBMT,GBTK->GBMK", weights_GBMT, v_GBTK)
    return out_GBMK.reshape(G, B, H // G, S, K).transpose(1, 3, 0, 2, 4).reshape(B, S, H, K)
