"""From evaluation rollouts to the figures of the report's table (the schema is `report.py`'s)."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from north_jax.agents.record import Rollout
from north_jax.evals.run import Sample
from north_jax.evals.stats import Interval, mean_interval, paired_interval, task_pass_at_k

Played = Mapping[str, Rollout]  # by Sample.key


def _task_scores(wanted: Sequence[Sample], played: Played, k: int) -> dict[str, float]:
    """pass@k per task. An episode that the environment failed twice says nothing of the model and is left out."""
    outcomes: dict[str, dict[int, list[bool]]] = {}
    for sample in wanted:
        rollout = played[sample.key]
        if rollout.valid:
            outcomes.setdefault(sample.task.id, {}).setdefault(sample.seed, []).append(rollout.status == "solved")
    return task_pass_at_k({task: list(seeds.values()) for task, seeds in outcomes.items()}, k)


def _interval(interval: Interval) -> list[float]:
    return [interval.mean, interval.low, interval.high]


def figures(wanted: Sequence[Sample], played: Played, greedy: Sequence[Sample], greedy_played: Played) -> dict:
    """pass@1, pass@8 and near-greedy pass@1 with 95 % intervals, and the means per rollout.

    invalid_rate: invalid actions / assistant turns.
    """
    rollouts = [played[s.key] for s in wanted]
    turns = sum(r.turns for r in rollouts)
    return {
        "pass_at_1": _interval(mean_interval(_task_scores(wanted, played, 1))),
        "pass_at_8": _interval(mean_interval(_task_scores(wanted, played, 8))),
        "near_greedy": _interval(mean_interval(_task_scores(greedy, greedy_played, 1))),
        "invalid_rate": sum(r.status == "invalid_action" for r in rollouts) / max(turns, 1),
        "turns": float(np.mean([r.turns for r in rollouts])),
        "tokens": float(np.mean([sum(r.mask) for r in rollouts])),
    }


def table(
    wanted: Sequence[Sample],
    greedy: Sequence[Sample],
    before: tuple[Played, Played],
    after: tuple[Played, Played],
    exposure: Mapping[str, str],
) -> list[dict]:
    """One row overall and one per family, harness, exposure group and template.

    before, after: (sampled, near-greedy) rollouts of the two models; exposure: template -> group name.
    """

    def row(group: str, name: str, keep: Callable[[Sample], bool]) -> dict:
        some, some_greedy = [s for s in wanted if keep(s)], [s for s in greedy if keep(s)]
        gain = paired_interval(_task_scores(some, before[0], 1), _task_scores(some, after[0], 1))
        greedy_gain = paired_interval(_task_scores(some_greedy, before[1], 1), _task_scores(some_greedy, after[1], 1))
        return {
            "group": group,
            "name": name,
            "tasks": len({s.task.id for s in some}),
            "before": figures(some, before[0], some_greedy, before[1]),
            "after": figures(some, after[0], some_greedy, after[1]),
            "difference": _interval(gain),
            "near_greedy_difference": _interval(greedy_gain),
        }

    def rows(group: str, of: Callable[[Sample], str]) -> list[dict]:
        names = dict.fromkeys(of(s) for s in wanted)
        return [row(group, name, lambda s, name=name: of(s) == name) for name in names]

    return [
        row("overall", "all held-out tasks", lambda s: True),
        *rows("family", lambda s: s.task.family),
        *rows("harness", lambda s: s.harness),
        *rows("exposure", lambda s: exposure[s.task.template]),
        *rows("template", lambda s: s.task.template),
    ]
