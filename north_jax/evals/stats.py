"""Estimates from repeated attempts at tasks: pass@k and bootstrap intervals over tasks."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased chance that one of k attempts succeeds, from c successes in n: 1 - C(n-c, k) / C(n, k).

    Computed as 1 - prod_{i=n-c+1}^{n} (1 - k/i), which neither overflows nor cancels. Raises ValueError unless
    0 <= c <= n and 1 <= k <= n. Source: Chen et al., arXiv 2107.03374.
    """
    if not 0 <= c <= n:
        raise ValueError(f"{c} successes in {n} attempts is impossible: give 0 <= c <= n")
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {n} attempts: make at least {max(k, 1)} attempts per task")
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def task_pass_at_k(outcomes: Mapping[str, Sequence[Sequence[bool]]], k: int) -> dict[str, float]:
    """pass@k per task, averaged over seeds.

    `outcomes[task]` holds one sequence of attempts (solved or not) per seed. Raises ValueError naming a task that has
    no seed or a seed with fewer than k attempts.
    """
    scores = {}
    for task, seeds in outcomes.items():
        if not len(seeds):
            raise ValueError(f"task {task!r} has no attempts: evaluate it or leave it out")
        short = min(len(attempts) for attempts in seeds)
        if short < k:
            raise ValueError(f"task {task!r} has {short} attempts under one seed, but pass@{k} needs {k} or more")
        scores[task] = float(np.mean([pass_at_k(len(a), int(np.count_nonzero(a)), k) for a in seeds]))
    return scores


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over `tasks` tasks with its bootstrap interval."""

    mean: float
    low: float
    high: float
    tasks: int

    def excludes_zero(self) -> bool:
        """Whether 0 lies outside the interval."""
        return self.low > 0 or self.high < 0


def mean_interval(
    scores: Mapping[str, float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Mean of one score per task, with the percentile interval of a bootstrap over tasks.

    The task is the cluster: all attempts and seeds of a task are drawn together, because they are not independent.
    Tasks are taken in sorted order, so the interval depends on the scores and `seed` alone.
    """
    if not scores:
        raise ValueError("no task has a score: evaluate at least one task before asking for an interval")
    value_T = np.array([scores[task] for task in sorted(scores)], np.float64)
    generator = np.random.default_rng(seed)
    # How often each task is drawn, per resample: a [resamples, tasks] table of counts.
    count_RT = generator.multinomial(len(value_T), np.full(len(value_T), 1 / len(value_T)), size=resamples)
    mean_R = count_RT @ value_T / len(value_T)
    low, high = np.quantile(mean_R, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(value_T.mean()), float(low), float(high), len(value_T))


def paired_interval(
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Mean of after - before over the same tasks, with the interval of a bootstrap over tasks.

    Raises ValueError naming a task that only one of the two has.
    """
    if alone := sorted(before.keys() ^ after.keys()):
        raise ValueError(f"task {alone[0]!r} has a score from one model only: evaluate both models on the same tasks")
    difference = {task: after[task] - before[task] for task in before}
    return mean_interval(difference, level=level, resamples=resamples, seed=seed)
