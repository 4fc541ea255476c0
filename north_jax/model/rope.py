"""Rotary positions on interleaved pairs (GPT-J style): dimensions 2i and 2i+1 turn together."""

import jax
import jax.numpy as jnp


def rotary_angles(positions_BS: jax.Array, head_dim: int, theta: float, dtype) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position * theta^(-2i / head_dim), each [B, S, 1, head_dim / 2].

    Angles are float32; the results are rounded to `dtype`, as in the reference.
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions_BS.astype(jnp.float32)[:, :, None, None] * frequencies
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate(x_BSHK: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """(x_2i, x_2i+1) -> (x_2i cos - x_2i+1 sin, x_2i sin + x_2i+1 cos), in float32, back in the type of x."""
    cos, sin = cos.astype(jnp.float32), sin.astype(jnp.float32)
    pairs = x_BSHK.astype(jnp.float32).reshape(*x_BSHK.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x_BSHK.shape).astype(x_BSHK.dtype)
