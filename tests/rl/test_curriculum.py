"""The curriculum prefers templates whose groups are likely to carry a signal, and depends on nothing but its inputs."""

import collections

import pytest

from north_jax.envs import make_sandbox  # noqa: F401  registers the templates
from north_jax.envs.tasks import make_task
from north_jax.rl.curriculum import Curriculum, expected_yield


def test_expected_yield_has_its_closed_form():
    # Beta(1, 1): E[p^n] = E[(1-p)^n] = 1 / (n + 1).
    assert expected_yield(0, 0, 8) == pytest.approx(1 - 2 / 9)
    # A known rate of one half gives 1 - 2 * 0.5^n in the limit.
    assert expected_yield(1e6, 1e6, 8) == pytest.approx(1 - 2 * 0.5**8, abs=1e-3)
    assert expected_yield(64, 0, 8) < 0.15 and expected_yield(0, 64, 8) < 0.15
    assert expected_yield(3, 5, 8) == pytest.approx(expected_yield(5, 3, 8))


def make_curriculum() -> Curriculum:
    def make(name, n):
        return make_task(name, n, split="train", seed=0)

    return Curriculum(["create_file", "delete_file", "copy_file"], make, group_size=8, seed=3)


def test_it_follows_the_outcomes():
    curriculum = make_curriculum()
    for _ in range(10):
        curriculum.observe("create_file", 8, 0)
        curriculum.observe("delete_file", 0, 8)
        curriculum.observe("copy_file", 3, 5)
    drawn = collections.Counter(curriculum.task(n).template for n in range(300))
    # Ten groups fade to counts of about 26, so the yields are 0.22, 0.22 and 0.97: 206 draws of 300, three sigma is 24.
    assert drawn["copy_file"] > 182 and min(drawn["create_file"], drawn["delete_file"]) > 20


def test_the_same_outcomes_give_the_same_tasks():
    one, two = make_curriculum(), make_curriculum()
    for curriculum in (one, two):
        curriculum.observe("copy_file", 1, 7)
    assert [one.task(n).id for n in range(20)] == [two.task(n).id for n in range(20)]
