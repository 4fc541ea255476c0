"""Stacked layers are the same layers, under every policy of recomputation."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_decoder import TINY, ids

from north_jax.model import Decoder, blocks

# A dense layer, twice three sliding and a global one, and a sliding one.
CONFIG = dataclasses.replace(TINY, num_hidden_layers=10, layer_types=None)


def value_and_gradients(model):
    graph, params = nnx.split(model)

    def loss(params):
        model = nnx.merge(graph, params)
        x_BSD, counts_LE = model.hidden(ids(2, 20), segment_ids_BS=SEGMENTS, with_counts=True)
        return jnp.sum(model.logits(x_BSD) ** 2), counts_LE

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


SEGMENTS = jnp.asarray([[1] * 12 + [2] * 8, [1] * 17 + [0] * 3])


def by_layers(state, model):
    graph, _ = nnx.split(model)
    return jax.tree.leaves(nnx.state(blocks.unstack(nnx.merge(graph, state)), nnx.Param))


@pytest.fixture(scope="module")
def expected():
    (loss, counts_LE), gradients = value_and_gradients(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    return loss, counts_LE, jax.tree.leaves(gradients)


def test_few_layers_stay_as_they_are():
    few = dataclasses.replace(TINY, num_hidden_layers=blocks.FEWEST, layer_types=None)
    model = blocks.stack(Decoder(few, rngs=nnx.Rngs(0)))
    assert not model.stacked and len(model.layers) == blocks.FEWEST


@pytest.mark.parametrize("remat", blocks.REMAT)
def test_values_and_gradients_are_those_of_plain_layers(expected, remat):
    model = blocks.stack(Decoder(CONFIG, rngs=nnx.Rngs(0)), remat)
    assert model.stacked and len(model.layers) == 2
    assert model.layers[1].mlp.gate_EDF.get_metadata("axes")[0] == "layer"
    (loss, counts_LE), gradients = value_and_gradients(model)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    np.testing.assert_array_equal(counts_LE, expected[1])
    for got, want in zip(by_layers(gradients, model), expected[2], strict=True):
        assert np.linalg.norm(got - want) <= 2e-6 * np.linalg.norm(want)


def test_counts_are_of_the_tokens_that_are_not_padding(expected):
    def traced(model):
        trace = {}
        _, counts_LE = model.hidden(ids(2, 20), segment_ids_BS=SEGMENTS, trace=trace, with_counts=True)
        return trace, counts_LE

    trace, counts_LE = nnx.jit(traced)(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    assert counts_LE.shape == (10, CONFIG.num_experts) and not counts_LE[0].any()  # layer 0 is dense
    for layer in range(1, 10):
        chosen_NC = np.asarray(trace[f"layer{layer}/router_topk_indices"])[np.asarray(SEGMENTS) > 0]
        np.testing.assert_array_equal(counts_LE[layer], np.bincount(chosen_NC.ravel(), minlength=CONFIG.num_experts))
    np.testing.assert_array_equal(counts_LE, expected[1])


def test_there_and_back():
    plain = nnx.state(Decoder(CONFIG, rngs=nnx.Rngs(0)), nnx.Param)
    back = nnx.state(blocks.unstack(blocks.stack(Decoder(CONFIG, rngs=nnx.Rngs(0)))), nnx.Param)
    assert jax.tree.structure(plain) == jax.tree.structure(back)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), plain, back))


def test_stacking_holds_one_parameter_twice(monkeypatch):
    def held():
        return sum(x.nbytes for x in jax.live_arrays())

    before = held()
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    whole, peaks, stack = held() - before, [], jnp.stack

    def watched(arrays):
        stacked = stack(arrays)
        peaks.append(held() - before - whole - stacked.nbytes)
        return stacked

    monkeypatch.setattr(jnp, "stack", watched)
    gc.disable()  # or what is held only by a cycle would now and then be seen to go
    try:
        model = blocks.stack(model)
    finally:
        gc.enable()
    # Nine parameters; what is stacked already has taken its layers' place.
    assert peaks == [0] * 9


def test_stacked_layers_have_no_trace_and_no_cache():
    with pytest.raises(ValueError, match="`unstack` the model first"):
        blocks.stack(Decoder(CONFIG, rngs=nnx.Rngs(0))).hidden(ids(1, 8), trace={})


def test_attention_is_computed_again_only_where_it_is_not_kept():
    config = dataclasses.replace(CONFIG, head_dim=128)

    def kernels(remat):
        graph, params = nnx.split(nnx.eval_shape(lambda: blocks.stack(Decoder(config, rngs=nnx.Rngs(0)), remat)))

        def loss(params):
            return nnx.merge(graph, params).hidden(ids(2, 16)).sum()

        text = jax.export.export(jax.jit(jax.grad(loss)), platforms=["tpu"])(params).mlir_module()
        return text.count('kernel_name = "attention_forward"')

    counts = {remat: kernels(remat) for remat in ("none", "block", "attention")}
    assert counts == {"none": 3, "block": 6, "attention": 3}
