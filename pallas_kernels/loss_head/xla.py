"""The head in chunks of a row, one after the other: what any platform has, and what a mesh may split as it likes."""

import jax
import jax.numpy as jnp

# Places of a row whose logits exist at one time. The backward pass computes them again: whole, they would be the
# largest array of a step, and on a CPU it costs more to write and read them than to compute them twice.
CHUNK = 128


def token_logprobs(x_BSD: jax.Array, w_VD: jax.Array, target_BS: jax.Array, scale: float, with_entropy: bool):
    """See `api.token_logprobs`."""

    def head(chunk):
        x_BSD, target_BS = chunk
        logits_BSV = jnp.einsum("BSD,VD->BSV", x_BSD, w_VD, preferred_element_type=jnp.float32) * scale
        lse_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
        logp_BS = jnp.take_along_axis(logits_BSV, target_BS[:, :, None], axis=-1)[:, :, 0] - lse_BS
        if not with_entropy:
            return logp_BS, lse_BS
        # As a sum of what each has: lse less the mean logit would be a difference of numbers as large as the logits.
        logp_BSV = jax.lax.stop_gradient(logits_BSV - lse_BS[:, :, None])
        return logp_BS, lse_BS, -(jnp.exp(logp_BSV) * logp_BSV).sum(-1)

    B, S, D = x_BSD.shape
    size = min(CHUNK, S)
    count = -(-S // size)
    rest = count * size - S
    x_nBSD = jnp.pad(x_BSD, ((0, 0), (0, rest), (0, 0))).reshape(B, count, size, D).swapaxes(0, 1)
    target_nBS = jnp.pad(target_BS, ((0, 0), (0, rest))).reshape(B, count, size).swapaxes(0, 1)
    values = jax.lax.map(jax.checkpoint(head), (x_nBSD, target_nBS))
    return tuple(value_nBS.swapaxes(0, 1).reshape(B, count * size)[:, :S] for value_nBS in values)
