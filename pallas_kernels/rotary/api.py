"""The public functions: they check their arguments, then call one backend by name."""

import jax
import jax.numpy as jnp

from pallas_kernels.rotary import auto, reference, rule, tpu

BACKENDS = {"reference": reference, "tpu": tpu, "auto": auto}


def angles(positions_BS: jax.Array, head_dim: int, theta: float, dtype) -> tuple[jax.Array, jax.Array]:
    """(cos_BSK, sin_BSK) of position * theta^(-2i / K) for both dimensions of pair i; sin is negated for the first.

    Angles are float32; the results are rounded to `dtype`, as in the reference.
    """
    pair_K = jnp.arange(head_dim) // 2
    angles_BSK = positions_BS.astype(jnp.float32)[..., None] * theta ** (-2 * pair_K.astype(jnp.float32) / head_dim)
    sign_K = jnp.where(jnp.arange(head_dim) % 2 == 0, -1, 1)
    return jnp.cos(angles_BSK).astype(dtype), (sign_K * jnp.sin(angles_BSK)).astype(dtype)


def rotate(x_BSHK: jax.Array, cos_BSK: jax.Array, sin_BSK: jax.Array, *, backend: str) -> jax.Array:
    """(x_2i, x_2i+1) -> (x_2i cos - x_2i+1 sin, x_2i sin + x_2i+1 cos), in float32, back in the type of x.

    cos and sin are those of `angles`. Differentiable in x alone, with every backend. `backend` is "reference", "tpu"
    (our kernel, for one device; K a multiple of 128) or "auto": that where the program is compiled for a TPU and x has
    128 tokens a row or more, else "reference". Raises ValueError on an unknown backend and on shapes that do not fit.
    """
    if backend not in BACKENDS:
        raise ValueError(f"rotate: backend {backend!r} is not known; choose one of {sorted(BACKENDS)}")
    B, S, _, K = x_BSHK.shape
    if K % 2 or not cos_BSK.shape == sin_BSK.shape == (B, S, K):
        raise ValueError(
            f"rotate: x {x_BSHK.shape}, cos {cos_BSK.shape} and sin {sin_BSK.shape} do not fit; pass [B, S, H, K]"
            " with K even, and [B, S, K]"
        )
    if backend == "tpu" and K % tpu.LANES:
        raise ValueError(f"rotate: the tpu backend takes heads whose width divides by 128, not {K}; choose reference")
    return rule.rotate(BACKENDS[backend].rotate, x_BSHK, cos_BSK, sin_BSK)
