"""Groups of rollouts and the file they are kept in."""

import dataclasses
import json

import numpy as np
import pytest

from north_jax.agents.episode import STATUSES
from north_jax.agents.record import Rollout, check_rollout, rollout_from_json, rollout_to_json, version_S
from north_jax.rl.groups import Group, GroupFile, read_groups


def make_rollout(seed=0, length=40, status="solved", **changes):
    rng = np.random.default_rng(seed)
    mask = rng.random(length) < 0.5
    mask[:1] = False
    fields = {
        "task": "fix the bug",
        "family": "software",
        "template": "off by one",
        "harness": "bash",
        "seed": seed,
        "ids": rng.integers(0, 1500, length).tolist(),
        "mask": mask.astype(int).tolist(),
        "logprobs": (np.log(rng.random(length).astype(np.float32)) * mask).tolist(),
        "versions": [(0, length // 2, "4"), (length // 2, length, "8")],
        "status": status,
        "detail": "Grüße\n",
        "turns": 3,
        "seconds": 1.25,
    }
    return Rollout(**fields | changes)


@pytest.mark.parametrize("length", [0, 1, 2, 300])
def test_json_round_trip_is_exact(length):
    rollout = make_rollout(seed=length, length=length)
    check_rollout(rollout)
    again = rollout_from_json(json.loads(json.dumps(rollout_to_json(rollout))))
    same = dataclasses.replace(again, logprobs=rollout.logprobs)
    assert same == rollout
    # What is kept of the sampler's number is its float32, bit for bit.
    np.testing.assert_array_equal(np.float32(again.logprobs), np.float32(rollout.logprobs))


def test_rollout_of_another_version_of_the_code_is_refused():
    record = rollout_to_json(make_rollout())
    del record["template"]
    with pytest.raises(ValueError, match=r"has or lacks \['mood', 'template'\]: it was written by another version"):
        rollout_from_json(record | {"mood": "good"})


def test_group_file_round_trip(tmp_path):
    groups = [
        Group(id, "task", (make_rollout(id), make_rollout(id + 50)), attempt=id % 2, version=4) for id in range(5)
    ]
    path = tmp_path / "rollouts.jsonl"
    with GroupFile(path) as file:
        offsets = [file.append(group) for group in groups[:3]]
    with open(path, "ab") as torn:
        torn.write(b'{"id":3,"attempt"')
    with GroupFile(path) as file:
        assert "dropped an unfinished last line of 17 bytes" in file.note
        offsets += [file.append(group) for group in groups[3:]]
        for group, offset in reversed(list(zip(groups, offsets, strict=True))):
            read = file.read(group.id, offset)
            assert (read.id, read.task, read.attempt, read.version) == (group.id, "task", group.attempt, 4)
            assert [member.ids for member in read.members] == [member.ids for member in group.members]
        for offset in (offsets[0], offsets[1] + 3, 10**9):
            with pytest.raises(ValueError, match=f"does not have group 1 at byte {offset}"):
                file.read(1, offset)
    assert [group.id for group in read_groups(path)] == [0, 1, 2, 3, 4]


def test_versions_of_tokens():
    assert version_S(make_rollout(length=5, versions=[(1, 3, "0"), (4, 5, "12")])).tolist() == [-1, 0, 0, -1, 12]


def test_status_and_signal():
    assert [make_rollout(status=status).valid for status in STATUSES] == [True, True, True, True, False]
    solved, wrong, lost = make_rollout(1), make_rollout(2, status="wrong"), make_rollout(3, status=STATUSES[-1])
    assert Group(0, "t", (solved, wrong, lost)).advantages().tolist() == [1, -1, 0]
    assert Group(0, "t", (solved, wrong, lost)).has_signal()
    assert not Group(0, "t", (solved, lost)).has_signal()
    assert not Group(0, "t", (wrong, wrong)).has_signal()
    silent = make_rollout(4, mask=[0] * 40), make_rollout(5, mask=[0] * 40, status="wrong")
    assert not Group(0, "t", silent).has_signal()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [0.0] * 39}, r"have lengths \[39, 40\]"),
        ({"mask": [1] * 40}, "the first token is an action"),
        ({"logprobs": [float("nan")] * 40}, "not a finite number <= 0"),
        ({"logprobs": [0.5] * 40}, "not a finite number <= 0"),
        ({"versions": [(0, 20, "4")]}, "the version spans do not cover every token that was drawn"),
        ({"status": "crashed"}, "status 'crashed' is unknown; use one of solved"),
    ],
)
def test_what_does_not_fit_is_not_stored(changes, message, tmp_path):
    with (
        GroupFile(tmp_path / "rollouts.jsonl") as file,
        pytest.raises(ValueError, match=rf"rollout of task 'fix the bug' with seed 0: .*{message}"),
    ):
        file.append(Group(0, "fix the bug", (make_rollout(1), make_rollout(**changes))))
    assert not (tmp_path / "rollouts.jsonl").read_bytes()
