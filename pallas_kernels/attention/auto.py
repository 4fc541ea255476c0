"""The kernels of the chip that the program is compiled for, where they take the arrays; XLA's products elsewhere.

Settled when it is lowered, inside the rule of differentiation: around it, each platform would save what others need.
"""

import functools

import jax

from pallas_kernels.attention import gpu, tpu, xla
from pallas_kernels.attention.rule import differentiable


def attention(
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    start_BS: jax.Array,
    end_BS: jax.Array,
    scale: float,
    *,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.attention`."""
    kernels = {}
    if tpu.takes(q_BSHK):
        kernels["tpu"] = tpu
    if gpu.takes(q_BSHK):
        kernels["cuda"] = gpu

    def choose(name: str):
        default = functools.partial(getattr(xla, name), scale=scale, window=window)
        ours = {platform: functools.partial(getattr(kernel, name), scale=scale) for platform, kernel in kernels.items()}
        return functools.partial(jax.lax.platform_dependent, default=default, **ours) if ours else default

    return differentiable(choose("forward"), choose("backward"))(q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS)
