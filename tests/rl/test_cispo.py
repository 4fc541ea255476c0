"""CISPO and its metrics against the recorded vectors (folder NORTH_ORACLE): values and gradients.

Every case runs in float32 (tolerance 1e-5) and in float64 (1e-10).
"""

import json
import os
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from north_jax.rl.advantages import rloo
from north_jax.rl.loss import cispo, denominators, mismatch_by_lag, mismatch_metrics, version_lag
from north_jax.train.loss import token_logprobs

FILE = Path(os.environ.get("NORTH_ORACLE", Path(__file__).parents[1] / "data" / "oracle")) / "cispo_vectors.json"
VECTORS = json.loads(FILE.read_text()) if FILE.exists() else {}
pytestmark = pytest.mark.skipif(not VECTORS, reason=f"{FILE} is not there: name its folder in NORTH_ORACLE")

# Sections of the file that the trainer has no feature for. Their ratio is against the sampler's log-probabilities
# alone, with one clip, so there is nothing to correct or to mask on top of it.
NOT_IMPLEMENTED = {
    "minimax_m1_eq6_mask": "PPO-like token mask (MiniMax-M1 eq. 6-7)",
    "sequence_level": "sequence importance weights and the off-policy sequence mask",
    "kl_term": "KL penalty to a reference model (its k3 estimate is a metric here, and is checked)",
    "three_policy_tis": "truncated importance weight on a recomputed old policy (`direct_loss` is checked)",
}
# Values of a case's `weight` other than "clip": masked importance sampling (IcePop).
IMPLEMENTED_WEIGHTS = {"clip"}


def needs(*sections):
    """Skips where the file lacks a section."""
    missing = [section for section in sections if section not in VECTORS]
    return pytest.mark.skipif(bool(missing), reason=f"{FILE} has no section {', '.join(missing)}")


@pytest.fixture(params=[np.float32, np.float64], ids=["float32", "float64"])
def dtype(request):
    with jax.enable_x64(request.param is np.float64):
        yield request.param


def close(actual, expected, dtype, scale=1.0):
    tolerance = 1e-10 if dtype is np.float64 else 1e-5
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=tolerance, atol=tolerance * scale)


def value_and_grad(case, dtype, denominator=None, rows=slice(None)):
    """Loss, metrics and dL/dlogp of a case, or of some of its rows. Masked places are poisoned with NaN."""
    mask = np.array(case["mask"], bool)[rows]

    def poisoned(name):
        return jnp.asarray(np.where(mask, np.array(case[name], dtype)[rows], np.nan), dtype)

    def loss(logp_BS):
        return cispo(
            logp_BS,
            poisoned("logp_sampler"),
            jnp.asarray(np.array(case["advantage"], dtype)[rows]),
            jnp.asarray(mask),
            ratio_floor=case["clip"][0],
            ratio_cap=case["clip"][1],
            denominator=mask.sum() if denominator is None else denominator,
        )

    (value, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(poisoned("logp"))
    return value, metrics, gradient


def cispo_cases():
    return [case for case in VECTORS.get("cispo", []) if case["weight"] in IMPLEMENTED_WEIGHTS]


def input_case(name):
    """A named token-level case. The two that others refer to can be put together from the rest if they are missing."""
    cases = {case["name"]: case for case in VECTORS["cispo"]}
    if name in cases:
        return cases[name]
    data = cases["mixed_ratio_cap1.2"] | {"clip": [0.0, 5.0]}
    return data | {"mask": VECTORS["kl_term"]["mask"]} if name == "padding_tools_empty_row" else data


def test_every_section_is_checked_or_named():
    checked = {"about", "cispo", "shards", "aggregation", "mismatch_metrics", "logits_level", "advantages"}
    checked |= {"advantage_identities", "end_to_end", "pass_at_k", "version_lag"}
    assert VECTORS.keys() <= checked | NOT_IMPLEMENTED.keys()


@pytest.mark.parametrize("case", cispo_cases(), ids=lambda case: case["name"])
def test_token_level(case, dtype):
    value, metrics, gradient = value_and_grad(case, dtype)
    expect = case["expect"]
    assert value.dtype == gradient.dtype == dtype
    close(value, expect["loss"], dtype)
    close(gradient, expect["dloss_dlogp"], dtype)
    for name, number in expect["metrics"].items():
        if dtype is np.float32 and case["name"] == "boundary" and name.startswith("clip_"):
            continue  # whether a ratio lies just above or just below the cap is a matter of float64
        close(metrics[name], number, dtype)


@needs("cispo", "kl_term", "shards")
def test_shards_add_up_to_the_whole(dtype):
    """With the global denominator the losses of micro-batches sum to the whole; a mean of their means does not."""
    case, shards = input_case("padding_tools_empty_row"), VECTORS["shards"]
    value, _, _ = value_and_grad(case, dtype, shards["global_tokens"])
    close(value, shards["full_loss"], dtype)
    total, means = 0.0, []
    for shard in shards["shards"]:
        value, _, gradient = value_and_grad(case, dtype, shards["global_tokens"], rows=shard["rows"])
        close(value, shard["loss"], dtype)
        close(gradient, shard["dloss_dlogp"], dtype)
        total += value
    close(total, shards["full_loss"], dtype)
    for rows in ([0, 1], [2, 3]):
        means.append(value_and_grad(case, dtype, rows=rows)[0])
    close(np.mean(means), shards["mean_of_shard_means_bug"], dtype)
    assert abs(np.mean(means) - shards["full_loss"]) > 1e-3


@needs("cispo", "kl_term", "aggregation")
def test_aggregations(dtype):
    section = VECTORS["aggregation"]
    case = input_case(section["input_case"])
    mask = np.array(case["mask"])
    for name, expected in section["expect"].items():
        denominator_N = denominators(mask.sum(1), section["group"], name, length=mask.shape[1])
        value, _, _ = value_and_grad(case, dtype, jnp.asarray(denominator_N, dtype)[:, None])
        close(value, expected, dtype)


@needs("three_policy_tis")
def test_anchor_on_the_sampler(dtype):
    case = VECTORS["three_policy_tis"]
    case = case | {"mask": case.get("mask", np.ones_like(case["logp"]))}
    close(value_and_grad(case, dtype)[0], case["direct_loss"], dtype)


@pytest.mark.parametrize("case", VECTORS.get("mismatch_metrics", []), ids=lambda case: case["name"])
def test_mismatch_metrics(case, dtype):
    mask = np.array(case["mask"], bool)
    sides = [np.where(mask, np.array(case[name], dtype), np.nan) for name in ("logp_trainer", "logp_sampler")]
    metrics = mismatch_metrics(*map(jnp.asarray, sides), jnp.asarray(mask))
    assert metrics.keys() == case["expect"].keys()
    for name, number in case["expect"].items():
        close(metrics[name], number, dtype)


@needs("kl_term")
def test_k3_of_the_reference_term(dtype):
    section = VECTORS["kl_term"]
    arrays = [jnp.asarray(np.array(section[name], dtype)) for name in ("logp_ref", "logp", "mask")]
    close(mismatch_metrics(*arrays)["k3"], section["k3_token_mean"], dtype)


def test_mismatch_without_tokens_is_that_of_identical_sides():
    metrics = mismatch_metrics(jnp.full((2, 3), jnp.nan), jnp.full((2, 3), -1.0), jnp.zeros((2, 3)))
    ones = {"pearson_prob", "ess_frac", "ppl_ratio"}
    assert {name: float(value) for name, value in metrics.items()} == {n: float(n in ones) for n in metrics}


def logits_loss(logits_BSV, section, expect_temperature, dtype):
    token_BS = jnp.asarray(section["token"])
    logp_BSV = jax.nn.log_softmax(logits_BSV / expect_temperature)
    logp_BS = jnp.take_along_axis(logp_BSV, token_BS[..., None], -1)[..., 0]
    return sampled_loss(logp_BS, section, dtype), logp_BS


def sampled_loss(logp_BS, section, dtype):
    return cispo(
        logp_BS,
        jnp.asarray(section["logp_sampler"], dtype),
        jnp.asarray(section["advantage"], dtype),
        jnp.asarray(section["mask"]),
        ratio_floor=section["clip"][0],
        ratio_cap=section["clip"][1],
        denominator=np.sum(section["mask"]),
    )[0]


def logits_cases():
    section = VECTORS.get("logits_level")
    if section is None:
        return []
    other = section["temperature"]
    return [
        pytest.param(1.0, section["expect"], id="T1"),
        pytest.param(other["T"], other, id=f"T{other['T']}"),
    ]


@pytest.mark.parametrize(("temperature", "expect"), logits_cases())
def test_gradient_of_the_logits(temperature, expect, dtype):
    section = VECTORS["logits_level"]
    logits_BSV = jnp.asarray(section["logits"], dtype)
    (value, logp_BS), gradient = jax.value_and_grad(logits_loss, has_aux=True)(logits_BSV, section, temperature, dtype)
    close(logp_BS, expect["logp"], dtype)
    close(value, expect["loss"], dtype)
    close(gradient, expect["dloss_dlogits"], dtype)


class GivenLogits:
    """A model whose hidden state is its logits, to put recorded logits through the trainer's own log-probabilities."""

    def __init__(self, logits_BSV):
        self.logits_BSV = logits_BSV
        self.embedding_VD = jnp.eye(logits_BSV.shape[-1])
        self.config = types.SimpleNamespace(logit_scale=1.0)

    def hidden(self, ids_BS, **_):
        return jnp.pad(self.logits_BSV, ((0, 0), (0, 1), (0, 0)))


@pytest.mark.parametrize(("temperature", "expect"), logits_cases())
def test_gradient_through_the_trainer_s_log_probabilities(temperature, expect):
    """The same numbers through `token_logprobs`, which predicts token s at position s - 1 and divides by T."""
    section = VECTORS["logits_level"]
    ids_BS = jnp.pad(jnp.asarray(section["token"]), ((0, 0), (1, 0)))
    positions_BS = jnp.broadcast_to(jnp.arange(ids_BS.shape[1]), ids_BS.shape)

    def loss(logits_BSV):
        model = GivenLogits(logits_BSV)
        logp_BS = token_logprobs(model, ids_BS, jnp.ones_like(ids_BS), positions_BS, temperature)[:, 1:]
        return sampled_loss(logp_BS, section, np.float32)

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(section["logits"], np.float32))
    close(value, expect["loss"], np.float32)
    close(gradient, expect["dloss_dlogits"], np.float32)


@needs("logits_level")
def test_gradient_is_not_that_of_the_known_mistakes(dtype):
    section = VECTORS["logits_level"]
    logp_BS = jnp.asarray(section["expect"]["logp"], dtype)
    gradient = np.asarray(jax.grad(sampled_loss)(logp_BS, section, dtype))
    close(gradient, section["wrong"]["right_dloss_dlogp"], dtype)
    for name, wrong in section["wrong"].items():
        if name != "right_dloss_dlogp":
            assert np.abs(gradient - np.array(wrong)).max() > 0.01, name


@needs("end_to_end")
def test_reward_to_loss(dtype):
    """Rewards -> advantages -> loss, zero-variance groups counted in the denominator or not."""
    section = VECTORS["end_to_end"]
    valid, group = np.array(section["valid"], bool), np.array(section["group"])
    advantage = rloo(section["reward"], valid, group)
    np.testing.assert_allclose(advantage, section["advantage"], rtol=0, atol=1e-10)
    mask = np.array(section["mask"]) * valid[:, None]
    varied = np.isin(group, group[advantage != 0])
    for name, keep in (("keep_zero_variance_in_denominator", valid), ("drop_zero_variance", valid & varied)):
        expect = section[name]
        tokens = mask[keep].sum()
        assert tokens == expect["tokens"]
        case = section | {"advantage": advantage, "mask": mask}
        value, _, gradient = value_and_grad(case, dtype, tokens)
        close(value, expect["loss"], dtype)
        close(gradient, expect["dloss_dlogp"], dtype)


@pytest.mark.parametrize("case", VECTORS.get("version_lag", []), ids=lambda case: case["name"])
def test_version_lag(case):
    assert version_lag(case["token_version"], case["mask"], case["consumed_at_step"]) == pytest.approx(case["expect"])


def test_version_lag_of_nothing_and_of_lost_weights():
    assert version_lag([3], [0], 4) == {"lag_oldest": 0, "lag_newest": 0, "lag_token_mean": 0.0, "versions": 0}
    assert version_lag([3, 9], [1, 1], 5) == {"lag_oldest": 2, "lag_newest": 0, "lag_token_mean": 1.0, "versions": 2}


def test_mismatch_by_lag_splits_the_tokens():
    rng = np.random.default_rng(0)
    logp, behaviour = -rng.random((2, 4, 6))
    mask, lag = rng.random((4, 6)) < 0.7, rng.integers(0, 3, (4, 6))
    by_lag = mismatch_by_lag(logp, behaviour, mask, lag)
    assert list(by_lag) == [0, 1, 2]
    assert sum(part["tokens"] for part in by_lag.values()) == mask.sum()
    whole = mismatch_metrics(jnp.asarray(logp), jnp.asarray(behaviour), jnp.asarray(mask))
    mean = sum(part["tokens"] * part["k3"] for part in by_lag.values()) / mask.sum()
    assert mean == pytest.approx(float(whole["k3"]), rel=1e-5)


def test_clipped_share_by_the_sign_of_the_advantage():
    logp, behaviour = jnp.zeros((2, 2)), jnp.array([[-3.0, 0.0], [-3.0, -3.0]])
    arguments = {"ratio_cap": 5.0, "denominator": 4}
    _, metrics = cispo(logp, behaviour, jnp.array([1.0, -1.0]), jnp.ones((2, 2)), **arguments)
    assert float(metrics["clip_high_frac_positive"]) == 0.5
    assert float(metrics["clip_high_frac_negative"]) == 1.0


def test_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="'mean' is unknown: use one of token_mean"):
        denominators([1], [0], "mean")
    with pytest.raises(ValueError, match="pass length"):
        denominators([1], [0], "const_norm_T")
