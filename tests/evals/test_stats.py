"""pass@k against the recorded cases (folder NORTH_ORACLE), intervals against closed forms."""

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest

from north_jax.evals.stats import mean_interval, paired_interval, pass_at_k, task_pass_at_k

FILE = Path(os.environ.get("NORTH_ORACLE", Path(__file__).parents[1] / "data" / "oracle")) / "cispo_vectors.json"
CASES = json.loads(FILE.read_text()).get("pass_at_k", []) if FILE.exists() else []


@pytest.mark.skipif(not FILE.exists(), reason=f"{FILE} is not there: name its folder in NORTH_ORACLE")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"n{case['n']}-c{case['c']}-k{case['k']}")
def test_pass_at_k(case):
    assert pass_at_k(case["n"], case["c"], case["k"]) == pytest.approx(case["pass_at_k"], abs=1e-10)


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 2), (6, 1, 3), (6, 6, 1), (4, 0, 4), (7, 3, 5)])
def test_pass_at_k_counts_subsets(n, c, k):
    subsets = list(itertools.combinations(range(n), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(min(s) < c for s in subsets) / len(subsets), abs=1e-12)


def test_pass_at_k_is_unbiased():
    n, k, p = 6, 3, 0.3
    chance = [np.prod([1, *range(n - c + 1, n + 1)]) / np.prod([1, *range(1, c + 1)]) for c in range(n + 1)]
    mean = sum(chance[c] * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_impossible_counts_are_refused(n, c, k):
    with pytest.raises(ValueError, match="attempts"):
        pass_at_k(n, c, k)


def test_task_pass_at_k_averages_seeds():
    scores = task_pass_at_k({"a": [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]], "b": [[True] * 4] * 3}, k=1)
    assert scores == pytest.approx({"a": 0.25, "b": 1.0})
    with pytest.raises(ValueError, match="task 'b' has 1 attempts under one seed, but pass@2"):
        task_pass_at_k({"a": [[1, 0]], "b": [[1, 0], [1]]}, k=2)
    with pytest.raises(ValueError, match="task 'c' has no attempts"):
        task_pass_at_k({"c": []}, k=1)


def test_mean_interval_approaches_the_normal_one():
    value = np.random.default_rng(1).normal(0.4, 0.2, size=400)
    interval = mean_interval({f"task {i}": v for i, v in enumerate(value)})
    half = 1.96 * value.std() / np.sqrt(len(value))
    assert (interval.mean, interval.tasks) == (pytest.approx(value.mean()), 400)
    assert interval.low == pytest.approx(value.mean() - half, abs=0.1 * half)
    assert interval.high == pytest.approx(value.mean() + half, abs=0.1 * half)
    assert interval.excludes_zero()


def test_interval_covers_as_often_as_it_says():
    """Tasks differ in difficulty, attempts at one task are alike: resampling tasks is what covers the true mean."""
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        rates = rng.beta(1, 2, size=60)  # mean 1/3
        outcomes = {f"t{i}": [rng.random(4) < rate for _ in range(3)] for i, rate in enumerate(rates)}
        interval = mean_interval(task_pass_at_k(outcomes, 1), resamples=500, seed=trial)
        covered += interval.low <= 1 / 3 <= interval.high
    assert 0.90 <= covered / 200 <= 0.99


def test_interval_depends_on_scores_and_seed_alone():
    scores = {str(i): (i % 7) ** 0.5 / 3 for i in range(30)}
    again = dict(reversed(scores.items()))
    assert mean_interval(scores) == mean_interval(again)
    assert mean_interval(scores) != mean_interval(scores, seed=1)
    single = mean_interval({"only": 0.5})
    assert (single.mean, single.low, single.high) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="no task has a score"):
        mean_interval({})


def test_paired_interval_is_narrower_where_tasks_differ_more_than_models():
    rng = np.random.default_rng(2)
    before = {str(i): v for i, v in enumerate(rng.uniform(0, 0.9, size=50))}
    after = {task: value + 0.1 + rng.normal(0, 0.02) for task, value in before.items()}
    paired = paired_interval(before, after)
    assert paired.mean == pytest.approx(0.1, abs=0.02)
    assert paired.excludes_zero()
    unpaired = mean_interval(after)
    assert paired.high - paired.low < 0.1 * (unpaired.high - unpaired.low)
    with pytest.raises(ValueError, match="task '7' has a score from one model only"):
        paired_interval(before, {task: value for task, value in after.items() if task != "7"})
