"""The ways to compute a mixture of experts, against the sum written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from north_jax.model import moe

E, D, F, C = 6, 16, 8, 2


def test_experts_are_grouped_where_most_are_left_out_and_tokens_are_many():
    size = moe.SMALL_MATRIX
    assert moe.kind(128, 8, 1, 1) == moe.kind(8, 2, moe.FEW_TOKENS + 1, size) == "grouped"
    assert moe.kind(8, 2, moe.FEW_TOKENS, size) == moe.kind(4, 2, 10**6, size) == "dense"
    assert moe.kind(8, 2, 10**6, size - 1) == "dense"


@pytest.mark.parametrize("tokens", [1, 3, moe.FEW_TOKENS, moe.FEW_TOKENS + 1])
def test_both_ways_are_the_weighted_sum_over_experts(tokens):
    keys = jax.random.split(jax.random.key(tokens), 5)
    x_ND = jax.random.normal(keys[0], (tokens, D))
    gate_EDF, up_EDF = (jax.random.normal(key, (E, D, F)) / 4 for key in keys[1:3])
    down_EFD = jax.random.normal(keys[3], (E, F, D)) / 4
    weights_NE, indices_NC = moe.route(jax.random.normal(keys[4], (tokens, E)), C, "sigmoid", True)
    matrices = gate_EDF, up_EDF, down_EFD

    def written_out(x_ND, *matrices):
        return sum(weights_NE[:, e, None] * moe.mlp(x_ND, *(w[e] for w in matrices)) for e in range(E))

    def dense(x_ND, *matrices):
        return moe.experts_dense(x_ND, weights_NE, *matrices)

    def grouped(x_ND, *matrices):
        return moe.experts_grouped(x_ND, weights_NE, indices_NC, *matrices)

    def value_and_gradients(function):
        gradients = jax.grad(lambda *a: jnp.sum(jnp.sin(function(*a))), argnums=range(4))(x_ND, *matrices)
        return function(x_ND, *matrices), *gradients

    expected = value_and_gradients(written_out)
    for function in (dense, grouped):
        for found, wanted in zip(value_and_gradients(function), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * max(1.0, float(jnp.abs(wanted).max())))
