"""The TPU kernels where the program is compiled for a TPU, XLA's product elsewhere: settled when it is lowered.

The choice lies inside the rules of differentiation: around them, each platform would save what the others need.
"""

import functools

import jax

from pallas_kernels.grouped_matmul import tpu, xla


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, tiles: tpu.Tiles | None = None) -> jax.Array:
    """See `api.grouped_matmul`."""
    kernel = functools.partial(tpu.gmm, tiles=tiles)
    return jax.lax.platform_dependent(x_PD, w_EDF, sizes_E, tpu=kernel, default=xla.grouped_matmul)


def _xla_gradients(x_PD, w_EDF, sizes_E, d_PF):
    _, pull = jax.vjp(lambda x_PD, w_EDF: xla.grouped_matmul(x_PD, w_EDF, sizes_E), x_PD, w_EDF)
    return pull(d_PF)


def _backward(tiles, saved, d_PF):
    kernels = functools.partial(tpu.gradients, tiles=tiles)
    return *jax.lax.platform_dependent(*saved, d_PF, tpu=kernels, default=_xla_gradients), None


grouped_matmul.defvjp(lambda *arguments: (grouped_matmul(*arguments), arguments[:-1]), _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def gated_grouped_matmul(
    x_PD: jax.Array, gate_EDF: jax.Array, up_EDF: jax.Array, sizes_E: jax.Array, tiles: tpu.Tiles | None = None
) -> jax.Array:
    """See `api.gated_grouped_matmul`."""
    kernel = functools.partial(tpu.gated, save=False, tiles=tiles)
    default = xla.gated_grouped_matmul
    return jax.lax.platform_dependent(
        x_PD, gate_EDF, up_EDF, sizes_E, tpu=lambda *arguments: kernel(*arguments)[0], default=default
    )


def _xla_gated(x_PD, gate_EDF, up_EDF, sizes_E):
    a_PF, b_PF = (xla.grouped_matmul(x_PD, w_EDF, sizes_E) for w_EDF in (gate_EDF, up_EDF))
    return jax.nn.silu(a_PF) * b_PF, a_PF, b_PF


def _xla_gated_gradients(x_PD, gate_EDF, up_EDF, sizes_E, a_PF, b_PF, d_PF):
    da_PF, db_PF = tpu.gated_slopes([d_PF, a_PF, b_PF])
    dxa_PD, dgate_EDF = _xla_gradients(x_PD, gate_EDF, sizes_E, da_PF)
    dxb_PD, dup_EDF = _xla_gradients(x_PD, up_EDF, sizes_E, db_PF)
    return dxa_PD + dxb_PD, dgate_EDF, dup_EDF


def _gated_forward(*arguments_and_tiles):
    *arguments, tiles = arguments_and_tiles
    kernel = functools.partial(tpu.gated, save=True, tiles=tiles)
    hidden_PF, a_PF, b_PF = jax.lax.platform_dependent(*arguments, tpu=kernel, default=_xla_gated)
    return hidden_PF, (*arguments, a_PF, b_PF)


def _gated_backward(tiles, saved, d_PF):
    kernels = functools.partial(tpu.gated_gradients, tiles=tiles)
    gradients = jax.lax.platform_dependent(*saved, d_PF, tpu=kernels, default=_xla_gated_gradients)
    return *gradients, None


gated_grouped_matmul.defvjp(_gated_forward, _gated_backward)
