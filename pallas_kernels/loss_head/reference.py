"""The definition in plain jnp: all logits at once. For tests."""

import jax
import jax.numpy as jnp


def token_logprobs(x_BSD: jax.Array, w_VD: jax.Array, target_BS: jax.Array, scale: float, with_entropy: bool):
    """See `api.token_logprobs`."""
    dtype = jnp.promote_types(x_BSD.dtype, jnp.float32)
    logits_BSV = jnp.einsum("BSD,VD->BSV", x_BSD.astype(dtype), w_VD.astype(dtype), precision="highest") * scale
    lse_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    logp_BSV = logits_BSV - lse_BS[..., None]
    logp_BS = jnp.take_along_axis(logp_BSV, target_BS[..., None], axis=-1)[..., 0]
    if not with_entropy:
        return logp_BS, lse_BS
    fixed_BSV = jax.lax.stop_gradient(logp_BSV)
    return logp_BS, lse_BS, -(jnp.exp(fixed_BSV) * fixed_BSV).sum(-1)
