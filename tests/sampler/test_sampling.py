import jax
import jax.numpy as jnp
import numpy as np
import pytest

from north_jax.sampler.sampling import MAX_STOP_IDS, Sampling, sample, token_uniforms

ROWS = 20_000
LOGITS_V = np.random.default_rng(0).normal(size=37).astype(np.float32) * 1.5


def draw(logits_V, temperature=1.0, top_p=1.0, rows=ROWS, top_k=0, min_p=0.0):
    seed_B2 = np.stack([np.zeros(rows), np.arange(rows)], axis=1).astype(np.uint32)
    token_B, logprob_B = jax.jit(sample)(
        jnp.broadcast_to(logits_V, (rows, len(logits_V))),
        token_uniforms(seed_B2, np.zeros(rows, np.int32)),
        jnp.full(rows, temperature, jnp.float32),
        jnp.full(rows, top_p, jnp.float32),
        jnp.full(rows, top_k, jnp.int32),
        jnp.full(rows, min_p, jnp.float32),
    )
    return np.asarray(token_B), np.asarray(logprob_B)


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def truncated(p, top_p, top_k=0, min_p=0.0):
    """By sorting, as the definition has it."""
    order = np.argsort(-p)
    last = np.searchsorted(np.cumsum(p[order]), top_p - 1e-9)
    kept = np.zeros(len(p))
    kept[order[: last + 1]] = p[order[: last + 1]]
    kept[order[top_k or len(p) :]] = 0
    kept[p < min_p * p.max()] = 0
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p"),
    [
        (1.0, 1.0, 0, 0.0),
        (0.5, 1.0, 0, 0.0),
        (1.0, 0.8, 0, 0.0),
        (1.3, 0.5, 0, 0.0),
        (1.0, 0.95, 0, 0.0),
        (1.0, 0.01, 0, 0.0),
        (1.0, 1.0, 5, 0.0),
        (1.0, 1.0, 1, 0.0),
        (1.0, 1.0, 1000, 0.0),
        (0.7, 1.0, 0, 0.2),
        (1.0, 0.7, 4, 0.0),
        (1.0, 0.7, 30, 0.0),
        (1.0, 0.9, 9, 0.3),
    ],
)
def test_draws_follow_the_truncated_distribution(temperature, top_p, top_k, min_p):
    tokens, logprobs = draw(LOGITS_V, temperature, top_p, top_k=top_k, min_p=min_p)
    full = softmax(LOGITS_V / np.float32(temperature))
    expected = truncated(full, top_p, top_k, min_p)
    counts = np.bincount(tokens, minlength=len(expected))
    assert not counts[expected == 0].any()
    live = expected > 0
    chi2 = np.sum((counts[live] - ROWS * expected[live]) ** 2 / (ROWS * expected[live]))
    freedom = live.sum() - 1
    assert chi2 <= freedom + 5 * np.sqrt(2 * freedom) + 1e-9  # fixed seeds: it passes always or never
    np.testing.assert_allclose(logprobs, np.log(full[tokens]), atol=2e-6)


def test_greedy_takes_the_maximum_and_reports_temperature_one():
    tokens, logprobs = draw(LOGITS_V, temperature=0.0, rows=3)
    assert tokens.tolist() == [LOGITS_V.argmax()] * 3
    np.testing.assert_allclose(logprobs, np.log(softmax(LOGITS_V).max()), atol=1e-6)


def test_rows_of_one_batch_have_their_own_truncation():
    top_p = np.array([1.0, 0.3], np.float32)
    tokens, _ = jax.vmap(
        lambda seed: sample(
            jnp.broadcast_to(LOGITS_V, (2, len(LOGITS_V))),
            token_uniforms(jnp.stack([seed, seed + 7]), jnp.zeros(2, jnp.int32)),
            jnp.ones(2),
            top_p,
            jnp.zeros(2, jnp.int32),
            jnp.zeros(2),
        )
    )(np.stack([np.arange(2000), np.arange(2000)], axis=1).astype(np.uint32))
    allowed = np.flatnonzero(truncated(softmax(LOGITS_V), 0.3))
    assert set(np.asarray(tokens)[:, 1]) == set(allowed)
    assert len(set(np.asarray(tokens)[:, 0])) > 3 * len(allowed)


def test_tokens_without_probability_are_never_drawn():
    logits_V = np.full(4096, -np.inf, np.float32)
    logits_V[[5, 1000, 4000]] = 0.0
    tokens, logprobs = draw(logits_V)
    assert set(tokens) == {5, 1000, 4000}
    np.testing.assert_allclose(logprobs, -np.log(3.0), atol=1e-6)


def test_weights_that_are_not_numbers_yield_a_token_and_no_logprob():
    tokens, logprobs = draw(np.full(37, np.nan, np.float32), rows=2)
    assert ((tokens >= 0) & (tokens < 37)).all()
    assert np.isnan(logprobs).all()


def test_from_json_reads_sglangs_names():
    sampling, n = Sampling.from_json(
        {"max_new_tokens": 7, "temperature": 0, "top_p": 0.9, "top_k": 5, "stop_token_ids": [4, 4, 2], "n": 3}
        | {"sampling_seed": 11, "ignore_eos": True, "min_p": 0.25, "skip_special_tokens": False}
    )
    assert n == 3
    assert sampling == Sampling(7, 0.0, 0.9, (2, 4), True, 11, 5, 0.25)
    assert {Sampling.from_json({"top_k": k})[0].top_k for k in (None, -1, 1 << 30)} == {0}
    assert Sampling.from_json({})[0].max_new_tokens == 128
    assert Sampling.from_json({})[0].seed != Sampling.from_json({})[0].seed


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"temprature": 1}, "temprature is not a field"),
        ({"min_p": 1.1}, r"min_p must be a number from 0.0 to 1.0"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5 is not implemented"),
        ({"stop": "x"}, "stop='x' is not implemented"),
        ({"temperature": -1}, "temperature must be a number from 0.0"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"temperature": True}, "temperature must be a number"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": 1.5}, "top_p must be a number from 0.0 to 1.0"),
        ({"top_k": 0}, "top_k must be at least 1, or -1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number from 1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be a whole number"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list"),
        ({"stop_token_ids": list(range(MAX_STOP_IDS))}, "at most 7 fit"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ([], "must be a JSON object"),
    ],
)
def test_from_json_refuses_by_name(params, sentence):
    with pytest.raises(ValueError, match=sentence):
        Sampling.from_json(params)
