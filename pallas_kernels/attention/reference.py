"""The definition in plain jnp: all scores at once. Quadratic in memory; for tests."""

import jax
import jax.numpy as jnp


def attention(
    q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, start_BS: jax.Array, end_BS: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.attention`."""
    B, S, H, K = q_BSHK.shape
    T, G = k_BTGK.shape[1:3]
    dtype = jnp.promote_types(q_BSHK.dtype, jnp.float32)
    q_BSGRK = q_BSHK.reshape(B, S, G, H // G, K).astype(dtype)
    scores_BGRST = jnp.einsum("BSGRK,BTGK->BGRST", q_BSGRK, k_BTGK.astype(dtype), precision="highest") * scale
    key_T = jnp.arange(T)
    seen_BST = (key_T >= start_BS[:, :, None]) & (key_T < end_BS[:, :, None])
    seen_B11ST = seen_BST[:, None, None]
    any_B11S1 = jnp.any(seen_B11ST, axis=-1, keepdims=True)
    # A query without keys: its scores become 0 before the softmax, and its output and log-sum-exp are set after it.
    scores_BGRST = jnp.where(seen_B11ST, scores_BGRST, jnp.where(any_B11S1, -jnp.inf, 0.0))
    lse_BGRS = jax.nn.logsumexp(scores_BGRST, axis=-1)
    weights_BGRST = jnp.where(any_B11S1, jnp.exp(scores_BGRST - lse_BGRS[..., None]), 0.0)
    out_BSGRK = jnp.einsum("BGRST,BTGK->BSGRK", weights_BGRST, v_BTGK.astype(dtype), precision="highest")
    lse_BHS = jnp.where(any_B11S1[..., 0], lse_BGRS, -jnp.inf).reshape(B, H, S)
    return out_BSGRK.reshape(B, S, H, K).astype(q_BSHK.dtype), lse_BHS
