"""The kernel where the program is compiled for a TPU, plain jnp elsewhere and for shapes the kernel does not take."""

import jax

from pallas_kernels.paged_attention import reference, tpu


def paged_attention(q_BSHK: jax.Array, k_GXPK: jax.Array, v_GXPK: jax.Array, *rest: jax.Array) -> jax.Array:
    """See `api.paged_attention`."""
    if tpu.unfit(q_BSHK, k_GXPK):
        return reference.paged_attention(q_BSHK, k_GXPK, v_GXPK, *rest)
    arguments = (q_BSHK, k_GXPK, v_GXPK, *rest)
    return jax.lax.platform_dependent(*arguments, tpu=tpu.paged_attention, default=reference.paged_attention)
