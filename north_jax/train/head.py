"""The loss head on a mesh: our kernels on every device's tokens and its part of the vocabulary."""

import jax
import jax.numpy as jnp

from north_jax.parallel import on_shards, parts, whole
from north_jax.parallel.sharding import RULES
from pallas_kernels import loss_head


def token_logprobs(
    x_BSD: jax.Array,
    w_VD: jax.Array,
    target_BS: jax.Array,
    *,
    scale: float = 1.0,
    with_entropy: bool = False,
    backend: str = "auto",
) -> tuple[jax.Array, ...]:
    """`pallas_kernels.loss_head.token_logprobs` of [B, S, D], by every device for its tokens and its rows of w.

    The T devices that share the vocabulary give lse_t, logp_t and entropy_t of their own rows, and then, exactly,

        lse = log Σ_t exp(lse_t),   logp = logp_t + lse_t - lse for the t that has the target,
        entropy = Σ_t share_t (entropy_t - log share_t),   share_t = exp(lse_t - lse)

    B and S divide over the mesh axes that split them.
    """
    pieces, rows = parts("vocab"), ("batch", "sequence")
    how = {"scale": scale, "with_entropy": with_entropy, "backend": backend}

    def local(x_BSD, w_VD, target_BS):
        w_VD = whole(w_VD, ("vocab", "embed"), "embed")
        if pieces > 1:
            target_BS = target_BS - jax.lax.axis_index(RULES["vocab"]) * len(w_VD)
        here_BS = (target_BS >= 0) & (target_BS < len(w_VD))
        values = loss_head.token_logprobs(x_BSD, w_VD, jnp.where(here_BS, target_BS, 0), **how)
        return tuple(value_BS[None] for value_BS in (here_BS, *values))

    each = [("vocab", *rows)] * (3 + with_entropy)
    outs = on_shards(local, ((*rows, None), ("vocab", "embed"), rows), each)
    here_TBS, logp_TBS, lse_TBS, *entropy = outs(x_BSD, w_VD, target_BS)
    if pieces == 1:
        return tuple(value_TBS[0] for value_TBS in (logp_TBS, lse_TBS, *entropy))
    lse_BS = jax.nn.logsumexp(lse_TBS, axis=0)
    logp_BS = jnp.sum(jnp.where(here_TBS, logp_TBS + (lse_TBS - lse_BS), 0.0), axis=0)
    if not with_entropy:
        return logp_BS, lse_BS
    log_share_TBS = jax.lax.stop_gradient(lse_TBS - lse_BS)
    return logp_BS, lse_BS, jnp.sum(jnp.exp(log_share_TBS) * (entropy[0] - log_share_TBS), axis=0)
