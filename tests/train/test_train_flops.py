"""The count of FLOPs against pairs counted one by one and against the compiler's own count."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from train_tiny import tiny_model

from north_jax.train import flops

SEGMENTS = np.asarray([[1] * 20 + [2] * 9 + [0] * 3, [1] * 3 + [2] + [3] * 28])


@pytest.mark.parametrize("window", [None, 1, 8, 40])
def test_pairs_are_those_that_are_seen(window):
    back = np.arange(32)[:, None] - np.arange(32)
    seen = (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (SEGMENTS[:, :, None] > 0) & (back >= 0)
    seen &= back < (window or 99)
    assert flops.visible(SEGMENTS, window) == ((SEGMENTS > 0).sum(), seen.sum())


def test_the_count_is_the_compilers_where_nothing_is_left_out():
    """One document a row, full attention, all experts chosen: XLA then computes the masked half of attention too."""
    model = tiny_model()
    config = dataclasses.replace(
        model.config, num_experts_per_tok=4, layer_types=("full_attention",) * 2, hidden_size=64, vocab_size=512
    )
    model = type(model)(config, rngs=nnx.Rngs(0), moe="dense", attention="reference")
    graph, params = nnx.split(model)
    ids_BS = jnp.ones((2, 32), jnp.int32)

    def forward(params):
        model = nnx.merge(graph, params)
        return model(ids_BS)

    counted = jax.jit(forward).lower(params).compile().cost_analysis()["flops"]
    ours = flops.step_flops(config, np.ones((2, 32), np.int32)) / 3
    masked = 2 * 4 * (2 * 32 * 31 // 2) * config.num_attention_heads * config.head_dim
    assert 1 < counted / (ours + masked) < 1.1  # norms, softmax, SiLU and routing come on top


def test_chips_are_known_by_their_names():
    def peak(kind):
        return flops.peak_flops(types.SimpleNamespace(device_kind=kind))

    assert peak("TPU v5 lite") == 197e12 and peak("TPU v5") == 459e12 and peak("NVIDIA H200 SXM") == 989e12
    assert peak("cpu") is None
