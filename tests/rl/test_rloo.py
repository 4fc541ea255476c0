"""Leave-one-out advantages against the recorded cases (folder NORTH_ORACLE)."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from north_jax.rl.advantages import rloo

FILE = Path(os.environ.get("NORTH_ORACLE", Path(__file__).parents[1] / "data" / "oracle")) / "cispo_vectors.json"
VECTORS = json.loads(FILE.read_text()) if FILE.exists() else {}
pytestmark = pytest.mark.skipif(not VECTORS, reason=f"{FILE} is not there: name its folder in NORTH_ORACLE")

# `advantage_identities` also holds the three group-normalised advantages, which the trainer does not have.
NOT_IMPLEMENTED = {"dr_grpo_mean_only", "grpo_pop_std_eps1e-6", "grpo_sample_std_eps1e-6"}


@pytest.mark.parametrize("case", VECTORS.get("advantages", []), ids=lambda case: case["name"])
def test_advantages(case):
    advantage = rloo(case["reward"], case["valid"], case["group"])
    np.testing.assert_allclose(advantage, case["rloo"], rtol=0, atol=1e-10)
    assert (advantage[np.array(case["rloo"]) == 0] == 0).all()


@pytest.mark.parametrize("case", VECTORS.get("advantage_identities", []), ids=lambda case: str(case["reward"]))
def test_rloo_is_mean_baseline_times_n_over_n_minus_1(case):
    reward = np.array(case["reward"], float)
    advantage = rloo(reward, np.ones(len(reward)), np.zeros(len(reward)))
    np.testing.assert_allclose(advantage, case["rloo"], rtol=0, atol=1e-10)
    factor = case["factor_rloo_over_mean_only"]
    np.testing.assert_allclose(advantage, factor * np.array(case["dr_grpo_mean_only"]), rtol=0, atol=1e-10)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7])
def test_equal_rewards_give_exactly_zero(value):
    assert (rloo([value] * 7, [1] * 7, [0] * 7) == 0).all()


def test_an_invalid_member_changes_nothing_for_the_others():
    with_it = rloo([1, 0, 1, 0.5], [1, 1, 1, 0], [5, 5, 5, 5])
    np.testing.assert_array_equal(with_it, [*rloo([1, 0, 1], [1, 1, 1], [0, 0, 0]), 0])
