"""The definition in plain jnp: every row's pages gathered to one piece, then attention under a mask.

What every platform has, and what a mesh may split by heads.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.masked import attend


def paged_attention(
    q_BSHK: jax.Array,
    k_GXPK: jax.Array,
    v_GXPK: jax.Array,
    table_BW: jax.Array,
    start_BS: jax.Array,
    end_BS: jax.Array,
) -> jax.Array:
    """See `api.paged_attention`. A query without keys gets the mean of all values in its table, not 0."""

    def gather(pages_GXPK: jax.Array) -> jax.Array:
        G, _, P, K = pages_GXPK.shape
        B, W = table_BW.shape
        return pages_GXPK[:, table_BW].reshape(G, B, W * P, K).astype(q_BSHK.dtype)

    key_T = jnp.arange(table_BW.shape[1] * k_GXPK.shape[2])
    mask_BST = (key_T >= start_BS[:, :, None]) & (key_T < end_BS[:, :, None])
    return attend(q_BSHK, gather(k_GXPK), gather(v_GXPK), mask_BST)
