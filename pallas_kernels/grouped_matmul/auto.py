"""Our kernels where the program is compiled for a TPU or for CUDA, XLA's product elsewhere: settled when it is lowered.

The choice lies inside the rules of differentiation: around them, each platform would save what the others need.
"""

import functools
from collections.abc import Callable

import jax

from pallas_kernels.grouped_matmul import gpu, tpu, xla
from pallas_kernels.grouped_matmul.gating import gated_slopes


def _chosen(name: str, default: Callable, *arguments, tiles: tpu.Tiles | None, **options) -> tuple[jax.Array, ...]:
    """default(*arguments), or on a platform that has kernels for the first two's dtype its module's `name`."""
    branches = {"tpu": functools.partial(getattr(tpu, name), tiles=tiles, **options)}
    if gpu.supports(*arguments[:2]):
        branches["cuda"] = functools.partial(getattr(gpu, name), **options)
    return jax.lax.platform_dependent(*arguments, **branches, default=default)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, tiles: tpu.Tiles | None = None) -> jax.Array:
    """See `api.grouped_matmul`."""
    return _chosen("gmm", xla.grouped_matmul, x_PD, w_EDF, sizes_E, tiles=tiles)


def _xla_gradients(x_PD, w_EDF, sizes_E, d_PF):
    _, pull = jax.vjp(lambda x_PD, w_EDF: xla.grouped_matmul(x_PD, w_EDF, sizes_E), x_PD, w_EDF)
    return pull(d_PF)


def _backward(tiles, saved, d_PF):
    return *_chosen("gradients", _xla_gradients, *saved, d_PF, tiles=tiles), None


grouped_matmul.defvjp(lambda *arguments: (grouped_matmul(*arguments), arguments[:-1]), _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def gated_grouped_matmul(
    x_PD: jax.Array, gate_EDF: jax.Array, up_EDF: jax.Array, sizes_E: jax.Array, tiles: tpu.Tiles | None = None
) -> jax.Array:
    """See `api.gated_grouped_matmul`."""
    arguments = x_PD, gate_EDF, up_EDF, sizes_E
    return _chosen("gated", lambda *arguments: xla.gated(*arguments)[:1], *arguments, tiles=tiles, save=False)[0]


def _xla_gated_gradients(x_PD, gate_EDF, up_EDF, sizes_E, a_PF, b_PF, d_PF):
    da_PF, db_PF = gated_slopes([d_PF, a_PF, b_PF])
    dxa_PD, dgate_EDF = _xla_gradients(x_PD, gate_EDF, sizes_E, da_PF)
    dxb_PD, dup_EDF = _xla_gradients(x_PD, up_EDF, sizes_E, db_PF)
    return dxa_PD + dxb_PD, dgate_EDF, dup_EDF


def _gated_forward(*arguments_and_tiles):
    *arguments, tiles = arguments_and_tiles
    hidden_PF, a_PF, b_PF = _chosen("gated", xla.gated, *arguments, tiles=tiles, save=True)
    return hidden_PF, (*arguments, a_PF, b_PF)


def _gated_backward(tiles, saved, d_PF):
    return *_chosen("gated_gradients", _xla_gated_gradients, *saved, d_PF, tiles=tiles), None


gated_grouped_matmul.defvjp(_gated_forward, _gated_backward)
