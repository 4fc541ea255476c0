"""The definition, in float32; on a CPU or a GPU XLA makes one pass of it."""

import jax
import jax.numpy as jnp


def rotate(x_BSHK: jax.Array, cos_BSK: jax.Array, sin_BSK: jax.Array) -> jax.Array:
    """See `api.rotate`."""

    def pairs(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
        return x[..., 0], x[..., 1]

    even, odd = pairs(x_BSHK)
    cos, _ = pairs(cos_BSK[:, :, None])
    _, sin = pairs(sin_BSK[:, :, None])
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x_BSHK.shape).astype(x_BSHK.dtype)
