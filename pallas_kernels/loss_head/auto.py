"""The kernels where the program is compiled for a TPU, XLA's chunks elsewhere: settled when it is lowered.

The choice lies inside the rules of differentiation: around them, each platform would save what the others need.
"""

import functools

import jax

from pallas_kernels.loss_head import tpu, xla


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def token_logprobs(x_BSD: jax.Array, w_VD: jax.Array, target_BS: jax.Array, scale: float, with_entropy: bool):
    """See `api.token_logprobs`."""
    how = {"scale": scale, "with_entropy": with_entropy}
    kernel, default = functools.partial(tpu.values, **how), functools.partial(xla.token_logprobs, **how)
    return jax.lax.platform_dependent(x_BSD, w_VD, target_BS, tpu=kernel, default=default)


def _forward(x_BSD, w_VD, target_BS, scale, with_entropy):
    found = token_logprobs(x_BSD, w_VD, target_BS, scale, with_entropy)
    return found, (x_BSD, w_VD, target_BS, found[1])


def _backward(scale, with_entropy, saved, cotangents):
    def xla_gradients(x_BSD, w_VD, target_BS, lse_BS, dlogp_BS, dlse_BS):
        _, pull = jax.vjp(lambda x, w: xla.token_logprobs(x, w, target_BS, scale, False), x_BSD, w_VD)
        return pull((dlogp_BS, dlse_BS))

    kernel = functools.partial(tpu.pull, scale=scale)
    return *jax.lax.platform_dependent(*saved, *cotangents[:2], tpu=kernel, default=xla_gradients), None


token_logprobs.defvjp(_forward, _backward)
