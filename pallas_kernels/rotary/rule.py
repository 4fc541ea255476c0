"""The rule of differentiation of every backend: the turn is orthogonal, so its gradient is the turn back."""

import functools
from collections.abc import Callable

import jax


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rotate(turn: Callable, x_BSHK: jax.Array, cos_BSK: jax.Array, sin_BSK: jax.Array) -> jax.Array:
    """`turn` of the three; differentiable in x alone."""
    return turn(x_BSHK, cos_BSK, sin_BSK)


def _forward(turn, x_BSHK, cos_BSK, sin_BSK):
    return turn(x_BSHK, cos_BSK, sin_BSK), (cos_BSK, sin_BSK)


def _backward(turn, angles, dout_BSHK):
    cos_BSK, sin_BSK = angles
    return turn(dout_BSHK, cos_BSK, -sin_BSK), None, None


rotate.defvjp(_forward, _backward)
