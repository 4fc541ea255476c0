"""The one norm of a layer and of the output: RMSNorm, or LayerNorm for checkpoints without `rms_norm_eps`."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """scale * x / sqrt(mean(x²) + eps) over the last axis; statistics in float32, the scale in the type of x."""
    x_f32 = x.astype(jnp.float32)
    normed = x_f32 * jax.lax.rsqrt(jnp.mean(x_f32 * x_f32, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale_D


def layer_norm(x: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """scale * (x - mean) / sqrt(variance + eps) over the last axis, without bias, all of it in float32."""
    x_f32 = x.astype(jnp.float32)
    centred = x_f32 - jnp.mean(x_f32, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (normed * scale_D.astype(jnp.float32)).astype(x.dtype)
