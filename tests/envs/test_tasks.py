"""Every template: the expert solves it, doing nothing does not, and held-out tasks share no words with training."""

import random
import re

import pytest

from north_jax.agents.expert import demonstrate, with_mistake
from north_jax.agents.harness import HARNESSES
from north_jax.envs import SandboxPool, make_sandbox
from north_jax.envs.tasks import TEMPLATES, Words, make_task, task_from_id, task_set


@pytest.fixture(scope="module")
def sandbox():
    with SandboxPool(make_sandbox, 1) as pool, pool.lend() as sandbox:
        yield sandbox


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_expert_solves_and_doing_nothing_does_not(sandbox, name, split):
    for index, harness in enumerate(HARNESSES):
        task = make_task(name, index, split=split, seed=7)
        sandbox.reset(dict(task.files))
        assert sandbox.verify(dict(task.verifier_files), task.verifier).exit_code != 0
        demonstrate(task, harness, sandbox, task.solution)  # raises unless the verifier says solved
        messages = demonstrate(task, harness, sandbox, with_mistake(task, random.Random(index)))
        assert [m["weight"] for m in messages if "weight" in m] == [0.0]


def test_a_task_is_a_function_of_its_id():
    task = make_task("rename_file", 3, split="heldout", seed=1)
    assert task_from_id(task.id, seed=1) == task
    assert make_task("rename_file", 4, split="heldout", seed=1) != task
    assert len({t.id for t in task_set(["copy_file", "delete_file"], 3, split="train", seed=0)}) == 6


def test_splits_share_no_words():
    train = {Words(random.Random(i), "train")() for i in range(2000)}
    heldout = {Words(random.Random(i), "heldout")() for i in range(2000)}
    assert len(train) > 500 and len(heldout) > 200 and not train & heldout
    for split, others in (("heldout", train), ("train", heldout)):
        for name in TEMPLATES:
            for i in range(5):
                assert not set(re.findall(r"\b[a-z]+\b", make_task(name, i, split=split, seed=0).instruction)) & others


@pytest.mark.parametrize(
    "forged",
    [
        "import os\nos.write(1, b'ok')\nos._exit(0)\n",
        "import sys\nsys.exit(0)\n",
        "class Any:\n    __eq__ = lambda *_: True\n\n\ndef __getattr__(name):\n    return Any\n",
    ],
)
def test_code_that_fools_its_own_tests_does_not_fool_the_verifier(sandbox, forged):
    task = make_task("wrong_constant", 0, split="train", seed=0)
    path = next(name for name in task.files if name != "test.py")
    sandbox.reset(dict(task.files) | {path: forged, "test.py": "print('ok')\n"})
    assert sandbox.run("python3 test.py").exit_code == 0
    assert sandbox.verify(dict(task.verifier_files), task.verifier).exit_code != 0


def test_bad_names_are_refused_in_one_sentence():
    with pytest.raises(ValueError, match="unknown task template 'nope'; known: append_line"):
        make_task("nope", 0, split="train", seed=0)
    with pytest.raises(ValueError, match="unknown task split 'dev'; use 'train' or 'heldout'"):
        Words(random.Random(0), "dev")
