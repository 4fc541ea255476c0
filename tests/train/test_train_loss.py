import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from train_tiny import tiny_corpus, tiny_model

from north_jax.train.loss import sft_loss, sft_metrics, token_logprobs


@pytest.fixture(scope="module")
def model():
    model = tiny_model()
    graphdef, params = nnx.split(model)
    # Larger weights than at initialisation: probabilities far from uniform.
    return nnx.merge(graphdef, jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params))


@pytest.fixture(scope="module")
def batch():
    # The last rows, as the first hold one long segment each.
    return {name: jnp.asarray(array[-4:]) for name, array in vars(tiny_corpus(32)).items() if name != "left_out"}


def arguments(batch):
    return batch["ids_BS"], batch["segment_ids_BS"], batch["positions_BS"]


def test_a_packed_token_has_the_probability_it_has_alone(model, batch):
    logp_BS = np.asarray(jax.jit(token_logprobs, static_argnums=4)(model, *arguments(batch), 0.7))
    segments_BS, ids_BS = np.asarray(batch["segment_ids_BS"]), np.asarray(batch["ids_BS"])
    assert (logp_BS[segments_BS == 0] == 0).all()
    places = [(r, np.flatnonzero(row == n)) for r, row in enumerate(segments_BS) for n in range(1, row.max() + 1)]
    assert len(places) > len(ids_BS)
    alone_NS = np.zeros((len(places), ids_BS.shape[1]), np.int32)
    for sequence, (row, at) in zip(alone_NS, places, strict=True):
        sequence[: len(at)] = ids_BS[row, at]
    log_p_NSV = np.asarray(jax.nn.log_softmax(jax.jit(lambda model, ids: model(ids))(model, alone_NS) / 0.7))
    for log_p_SV, sequence, (row, at) in zip(log_p_NSV, alone_NS, places, strict=True):
        expected = [0.0] + [log_p_SV[s - 1, sequence[s]] for s in range(1, len(at))]
        np.testing.assert_allclose(logp_BS[row, at], expected, atol=2e-5)


def test_rows_of_any_length_go_through_the_head_in_pieces(model):
    ids_BS = jnp.asarray(np.random.default_rng(0).integers(48, size=(1, 150)))  # a piece and a rest
    segments_BS, positions_BS = jnp.ones_like(ids_BS), jnp.arange(150)[None]
    log_p = jax.nn.log_softmax(model(ids_BS))[0]
    expected = [0.0] + [float(log_p[s - 1, ids_BS[0, s]]) for s in range(1, 150)]
    np.testing.assert_allclose(token_logprobs(model, ids_BS, segments_BS, positions_BS)[0], expected, atol=2e-5)


def test_entropy_is_of_the_distribution_a_token_was_drawn_from(model, batch):
    logp_BS, entropy_BS = token_logprobs(model, *arguments(batch), with_entropy=True)
    np.testing.assert_allclose(logp_BS, token_logprobs(model, *arguments(batch)), atol=1e-6)
    ids = batch["ids_BS"][:1, : int((batch["segment_ids_BS"][0] == 1).sum())]
    log_p = jax.nn.log_softmax(model(ids)[0])
    expected = -(jnp.exp(log_p) * log_p).sum(-1)
    assert entropy_BS[0, 0] == 0
    np.testing.assert_allclose(entropy_BS[0, 1 : ids.shape[1]], expected[:-1], atol=2e-5)


def test_the_gradient_is_that_of_log_softmax(model, batch):
    graphdef, params = nnx.split(model)

    def plain(params):
        model = nnx.merge(graphdef, params)
        ids_BS, segments_BS, positions_BS = arguments(batch)
        log_p = jax.nn.log_softmax(model(ids_BS, positions_BS=positions_BS, segment_ids_BS=segments_BS)[:, :-1])
        logp_BS = jnp.take_along_axis(log_p, ids_BS[:, 1:, None], axis=-1)[..., 0]
        weights_BS = batch["weights_BS"][:, 1:]
        return -(weights_BS * logp_BS).sum() / weights_BS.sum()

    ours, grads = jax.jit(jax.value_and_grad(lambda p: sft_loss(nnx.merge(graphdef, p), batch, batch)[0]))(params)
    expected, expected_grads = jax.jit(jax.value_and_grad(plain))(params)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * max(1.0, float(jnp.abs(want).max())))


def test_what_padding_holds_changes_nothing(model, batch):
    padded = np.asarray(batch["segment_ids_BS"]) == 0
    assert padded.any()
    poisoned = batch | {"ids_BS": jnp.where(padded, 17, batch["ids_BS"])}
    graphdef, params = nnx.split(model)

    @jax.jit
    def gradient(batch):
        return jax.grad(lambda p: sft_loss(nnx.merge(graphdef, p), batch, batch)[0])(params)

    for clean, other in zip(jax.tree.leaves(gradient(batch)), jax.tree.leaves(gradient(poisoned)), strict=True):
        np.testing.assert_array_equal(clean, other)


def test_the_loss_is_the_mean_over_the_weights_of_the_whole_batch(model, batch):
    loss, arrays = sft_loss(model, batch, batch)
    metrics = sft_metrics(batch, arrays)
    logp_BS, weights_BS = token_logprobs(model, *arguments(batch)), batch["weights_BS"]
    np.testing.assert_allclose(loss, -np.sum(logp_BS * weights_BS) / np.sum(weights_BS), rtol=1e-6)
    assert metrics["tokens"] == (batch["segment_ids_BS"] > 0).sum()
    assert metrics["loss_tokens"] == (weights_BS > 0).sum()
    np.testing.assert_allclose(metrics["fill"], metrics["tokens"] / weights_BS.size)


def test_a_batch_without_weights_has_loss_and_gradient_zero(model, batch):
    graphdef, params = nnx.split(model)
    silent = batch | {"weights_BS": jnp.zeros_like(batch["weights_BS"])}
    loss, grads = jax.jit(jax.value_and_grad(lambda p: sft_loss(nnx.merge(graphdef, p), silent, silent)[0]))(params)
    assert loss == 0 and all((g == 0).all() for g in jax.tree.leaves(grads))
