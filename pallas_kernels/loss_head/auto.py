"""The kernels where the program is compiled for a TPU and they take the arrays, XLA's chunks elsewhere.

Settled when it is lowered, inside the rule of differentiation: around it, each platform would save what others need.
"""

import functools
from collections.abc import Callable

import jax

from pallas_kernels.loss_head import tpu, xla


def _chosen(kernel: Callable, default: Callable, x_BSD: jax.Array, w_VD: jax.Array, *rest: jax.Array):
    branches = {"tpu": kernel} if tpu.takes(x_BSD, w_VD) else {}
    return jax.lax.platform_dependent(x_BSD, w_VD, *rest, **branches, default=default)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def token_logprobs(x_BSD: jax.Array, w_VD: jax.Array, target_BS: jax.Array, scale: float, with_entropy: bool):
    """See `api.token_logprobs`."""
    how = {"scale": scale, "with_entropy": with_entropy}
    kernel, default = functools.partial(tpu.values, **how), functools.partial(xla.token_logprobs, **how)
    return _chosen(kernel, default, x_BSD, w_VD, target_BS)


def _forward(x_BSD, w_VD, target_BS, scale, with_entropy):
    found = token_logprobs(x_BSD, w_VD, target_BS, scale, with_entropy)
    return found, (x_BSD, w_VD, target_BS, found[1])


def _backward(scale, with_entropy, saved, cotangents):
    def xla_gradients(x_BSD, w_VD, target_BS, lse_BS, dlogp_BS, dlse_BS):
        _, pull = jax.vjp(lambda x, w: xla.token_logprobs(x, w, target_BS, scale, False), x_BSD, w_VD)
        return pull((dlogp_BS, dlse_BS))

    kernel = functools.partial(tpu.pull, scale=scale)
    return *_chosen(kernel, xla_gradients, *saved, *cotangents[:2]), None


token_logprobs.defvjp(_forward, _backward)
