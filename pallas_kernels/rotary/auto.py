"""The kernel where the program is compiled for a TPU and it takes the array, XLA's elsewhere."""

import jax

from pallas_kernels.rotary import reference, tpu


def rotate(x_BSHK: jax.Array, cos_BSK: jax.Array, sin_BSK: jax.Array) -> jax.Array:
    """See `api.rotate`."""
    branches = {"tpu": tpu.rotate} if tpu.takes(x_BSHK) else {}
    return jax.lax.platform_dependent(x_BSHK, cos_BSK, sin_BSK, default=reference.rotate, **branches)
