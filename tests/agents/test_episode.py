"""How episodes end: by the verifier, by an invalid action, by the budget. And what a demonstration records."""

import dataclasses
import json
import random

import pytest

from north_jax.agents.episode import Episode
from north_jax.agents.expert import demonstrate, read_demonstrations, record, with_mistake
from north_jax.agents.harness import HARNESSES, Submit
from north_jax.chat.format import Completion, ToolCall
from north_jax.envs import SandboxPool, make_sandbox
from north_jax.envs.tasks import TEMPLATES, Replace, Run, Step, make_task


@pytest.fixture(scope="module")
def pool():
    with SandboxPool(make_sandbox, 2) as pool:
        yield pool


def bash(command: str) -> Completion:
    return Completion("", None, (ToolCall("bash", {"command": command}),))


def submit() -> Completion:
    return bash(HARNESSES["bash"].write(Submit(), "")["tool_calls"][0]["arguments"]["command"])


def test_only_the_verifier_gives_the_reward(pool):
    task = make_task("create_file", 0, split="train", seed=0)
    with pool.lend() as sandbox:
        episode = Episode(task, HARNESSES["bash"], sandbox)
        assert episode.step(submit()).status == "wrong"
        episode = Episode(task, HARNESSES["bash"], sandbox)
        assert episode.start()[-1] == {"role": "user", "content": task.instruction}
        shown = episode.step(bash(task.solution[0].action.command))
        assert shown.status is None and shown.message == {"role": "tool", "content": "exit 0\n"}
        assert episode.step(submit()).status == "solved"


def test_an_invalid_action_and_a_spent_budget_end_the_episode(pool):
    task = make_task("create_file", 0, split="train", seed=0)
    with pool.lend() as sandbox:
        result = Episode(task, HARNESSES["bash"], sandbox).step(Completion("", "hello", ()))
        assert result.status == "invalid_action" and "exactly one tool call" in result.detail
        episode = Episode(task, HARNESSES["bash"], sandbox)
        statuses = [episode.step(bash("true")).status for _ in range(task.max_turns)]
        assert statuses == [None] * (task.max_turns - 1) + ["out_of_budget"]


@pytest.mark.parametrize("name", [name for name, (family, _) in TEMPLATES.items() if family == "software"])
def test_a_shown_mistake_fails_the_tests_and_is_mended(pool, name):
    task = make_task(name, 0, split="train", seed=0)
    ways = (with_mistake(task, random.Random(n)) for n in range(99))
    steps = next(way for way in ways if isinstance(way[1].action, Replace) and way[1].mistake)
    with pool.lend() as sandbox:
        messages = demonstrate(task, "bash", sandbox, steps)
    shown = [m["content"] for m in messages if m["role"] == "tool"]
    assert shown[1] == "exit 0\n" and shown[2].startswith("exit 1\n") and shown[-1] == "exit 0\nok\n"
    assert len(shown[2]) < 200  # of the context
    assert [m["weight"] for m in messages if "weight" in m] == [0.0]


def test_a_solution_that_does_not_solve_is_no_demonstration(pool):
    task = make_task("create_file", 0, split="train", seed=0)
    with pool.lend() as sandbox, pytest.raises(RuntimeError, match=r"ended as 'wrong'.*mend the task template"):
        demonstrate(dataclasses.replace(task, solution=()), "bash", sandbox, (Step("", Run("true")),))


def test_record_writes_a_whole_file_once(pool, tmp_path):
    path = tmp_path / "demonstrations.jsonl"
    settings = {"harnesses": ("bash", "text"), "mistake_share": 0.5, "seed": 0, "workers": 2}
    assert record(path, pool, counts={"create_file": 3, "wrong_key": 3}, **settings) == 6
    first = path.read_bytes()
    assert record(path, pool, counts={"create_file": 9}, **settings) == 6 and path.read_bytes() == first
    conversations = read_demonstrations(path)
    assert {d["harness"] for d in conversations} == {"bash", "text"}
    assert any(m.get("weight") == 0.0 for d in conversations for m in d["messages"])
    assert json.loads(first.splitlines()[0])["task"] == "train-create_file-0"
    assert not list(tmp_path.glob("*.partial"))
