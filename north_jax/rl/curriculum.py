"""Which task the next group gets: templates are drawn by how likely a group of theirs carries a signal."""

import random
from collections.abc import Callable, Sequence

from north_jax.envs.tasks import Task

# A template's counts fade by this factor with each of its groups, since the policy changes under them.
_FADE = 0.7


def expected_yield(successes: float, failures: float, group_size: int) -> float:
    """Chance that a group has unequal rewards, 1 - E[p^n] - E[(1-p)^n] with p ~ Beta(successes + 1, failures + 1)."""
    a, b = successes + 1.0, failures + 1.0
    all_solved = all_failed = 1.0
    for i in range(group_size):
        all_solved *= (a + i) / (a + b + i)
        all_failed *= (b + i) / (a + b + i)
    return 1.0 - all_solved - all_failed


class Curriculum:
    """Draws a template in proportion to its expected yield, which follows the rewards of the run's own groups.

    `make(template, number)` gives the task of the number-th group. The draw depends on the seed, the number and the
    outcomes so far alone. A floor on the weights keeps every template in play.
    """

    FLOOR = 0.1

    def __init__(self, templates: Sequence[str], make: Callable[[str, int], Task], *, group_size: int, seed: int):
        self._counts = dict.fromkeys(templates, (0.0, 0.0))
        self._make, self._group_size, self._seed = make, group_size, seed

    def task(self, number: int) -> Task:
        """The task for the number-th group, given the outcomes observed so far."""
        weights = [max(self.FLOOR, expected_yield(*counts, self._group_size)) for counts in self._counts.values()]
        rng = random.Random(f"{self._seed}/curriculum/{number}")
        return self._make(rng.choices(list(self._counts), weights)[0], number)

    def observe(self, template: str, solved: int, failed: int) -> None:
        """A group of the template has ended with so many members solved and failed."""
        successes, failures = self._counts[template]
        self._counts[template] = (_FADE * successes + solved, _FADE * failures + failed)
