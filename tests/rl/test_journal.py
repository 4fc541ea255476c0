"""The journal: a run killed anywhere and resumed consumes the same groups in the same order, and loses none.

Run as a script (`python tests/rl/test_journal.py DIR`) it is the run that a test kills.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from north_jax.agents.record import Rollout
from north_jax.data.jsonl import JsonLines, read_lines
from north_jax.rl.groups import Group, GroupFile
from north_jax.rl.journal import Journal, fold

CAPACITY, WINDOW, PER_STEP, STEPS, CHECKPOINT_EVERY, MEMBERS = 6, 3, 2, 7, 3, 2


def rollouts(id: int, attempt: int) -> Group:
    members = tuple(
        Rollout(
            task=f"task {id % 4}",
            family="terminal",
            template="count",
            harness="bash",
            seed=100 * id + member,
            ids=[7, id, member],
            mask=[0, 1, 1],
            logprobs=[0.0, -0.5, -float(attempt)],
            versions=[(1, 3, "0")],
            status="solved" if member else "wrong",
            detail="",
            turns=1,
            seconds=0.1,
        )
        for member in range(MEMBERS)
    )
    return Group(id, f"task {id % 4}", members, attempt)


def drive(workdir: Path, pick: str = "completion", *, pause: float = 0.0) -> list[int]:
    """A whole run from its newest checkpoint; returns the order of consumption. What happens depends on state only."""
    checkpoint = workdir / "checkpoint"
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    with (
        GroupFile(workdir / "rollouts.jsonl") as file,
        Journal(workdir / "journal.jsonl", step=step, capacity=CAPACITY, window=WINDOW, pick=pick) as journal,
    ):
        state = journal.state
        while state.step < STEPS:
            time.sleep(pause)
            state.queue.check()
            while journal.queue.room:
                id = journal.queue.next_id
                assert journal.admit(f"task {id % 4}", version=state.version or 0) == id
            while len(state.held()) < PER_STEP and journal.take():
                pass
            if len(state.held()) == PER_STEP:
                for id in state.held():
                    group = file.read(id, state.groups[id].offset)
                    assert len(group.members) == MEMBERS
                journal.step(loss=0.1)
                if state.step % CHECKPOINT_EVERY == 0:
                    checkpoint.with_suffix(".new").write_text(str(state.step))
                    checkpoint.with_suffix(".new").rename(checkpoint)
                    journal.export(version=state.step)
                continue
            # Every fifth group is slow, every seventh fails, every eleventh has no signal.
            id = min(state.in_flight(), key=lambda id: id + 9 * (id % 5 == 0))
            for member in range(MEMBERS):
                journal.member(id, member, "wrong", 0.0)
            if id % 7 == 3:
                journal.fail(id, "the sandbox died three times")
                continue
            offset = file.append(rollouts(id, state.groups[id].attempt))
            journal.filter(id, offset) if id % 11 == 4 else journal.finish(id, offset)
        assert len(set(state.consumed)) == len(state.consumed) == STEPS * PER_STEP
        return [id for id, _ in state.consumed]


def checkpoint_at(lines: list[bytes]) -> int:
    """The newest checkpoint when the journal ended with these lines: the line of a step precedes its checkpoint."""
    steps = [event["step"] for event in map(json.loads, lines) if event["event"] == "export"]
    return max(steps, default=0)


@pytest.fixture(scope="module", params=["completion", "input"])
def whole_run(request, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("whole")
    order = drive(workdir, request.param)
    journal = (workdir / "journal.jsonl").read_bytes().splitlines(keepends=True)
    return request.param, order, journal, (workdir / "rollouts.jsonl").read_bytes()


def lay(workdir: Path, journal: list[bytes], rollouts: bytes, torn: bytes = b"") -> None:
    """The files as a process killed after these journal lines left them: rollouts are never behind the journal."""
    workdir.mkdir(exist_ok=True)
    (workdir / "journal.jsonl").write_bytes(b"".join(journal) + torn)
    ends = [e["offset"] for e in map(json.loads, journal) if e["event"] in ("finish", "filter")]
    end = rollouts.index(b"\n", max(ends)) + 1 if ends else 0
    (workdir / "rollouts.jsonl").write_bytes(rollouts[:end] + torn)
    if step := checkpoint_at(journal):
        (workdir / "checkpoint").write_text(str(step))
    else:
        (workdir / "checkpoint").unlink(missing_ok=True)


def test_killed_after_every_event(whole_run, tmp_path):
    pick, order, journal, stored = whole_run
    assert len(journal) > 80
    # Every event under the default pick; some under the other, which shares all but one line with it.
    for count in range(0, len(journal), 1 if pick == "completion" else 5):
        lay(tmp_path / "run", journal[:count], stored, journal[count][: count % len(journal[count])])
        assert drive(tmp_path / "run", pick) == order, f"killed after event {count}"


@settings(max_examples=8, deadline=None)
@given(kills=st.lists(st.floats(0, 1), min_size=2, max_size=4))
def test_killed_several_times(kills, tmp_path_factory):
    """Each run is killed at a random place of what it left; checkpoints may lie several kills back."""
    workdir = tmp_path_factory.mktemp("kills")
    order = drive(workdir)
    for kill in kills:
        journal = (workdir / "journal.jsonl").read_bytes().splitlines(keepends=True)
        lay(workdir, journal[: int(kill * len(journal))], (workdir / "rollouts.jsonl").read_bytes(), b'{"n":')
        assert drive(workdir) == order
    assert fold(workdir / "journal.jsonl").queue.stats()["failed"] > 0


def test_real_kill(tmp_path):
    """kill -9 of the process itself."""
    (tmp_path / "whole").mkdir()
    order = drive(tmp_path / "whole")
    run = [sys.executable, __file__, str(tmp_path)]
    process = subprocess.Popen(run, start_new_session=True)
    journal = tmp_path / "journal.jsonl"
    try:
        deadline = time.monotonic() + 120
        while not journal.exists() or journal.read_bytes().count(b"\n") < 60:
            assert process.poll() is None and time.monotonic() < deadline, "the run ended before it was killed"
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert fold(journal).step < STEPS
    assert drive(tmp_path) == order


def small(path, step=0, **settings):
    return Journal(path, step=step, **{"capacity": 4, "window": 2} | settings)


def test_in_flight_groups_restart_under_their_id_with_the_next_attempt(tmp_path):
    path = tmp_path / "journal.jsonl"
    with small(path) as journal:
        for task in "abcd":
            journal.admit(task, version=0)
        journal.member(0, 0, "wrong", 0.0)
        journal.member(1, 0, "solved", 1.0)
        journal.finish(1, offset=0)
        assert journal.retry(2, "the sandbox died") == 1
        journal.take()
    with small(path) as journal:
        state = journal.state
        assert {id: group.attempt for id, group in state.in_flight().items()} == {0: 1, 2: 2, 3: 1}
        assert state.groups[0].members == {} and state.groups[1].members == {0: ("solved", 1.0)}
        assert (state.groups[1].attempt, state.groups[1].status) == (0, "done")
        assert state.statuses == {"wrong": 1, "solved": 1}
        assert journal.take().id == 1


def test_lag_is_not_negative_after_a_resume(tmp_path):
    path = tmp_path / "journal.jsonl"
    with small(path, capacity=2, window=2) as journal:
        for _ in range(3):
            id = journal.admit("a", version=0)
            journal.finish(id, offset=0)
            journal.take()
            journal.step()
        journal.finish(journal.admit("a", version=3), offset=0)
    with small(path, step=1, capacity=3) as journal:
        assert journal.queue.room == 0
        assert [(taken.id, taken.lag) for taken in iter(journal.take, None)] == [(1, 0), (2, 0), (3, 0)]
        journal.step()
        assert journal.state.consumed == [(0, 1), (1, 2), (2, 2), (3, 2)]
        assert (journal.queue.trained, journal.queue.room) == (4, 3)
    assert fold(path).lags == [0, 0, 0, 0]


def test_unfinished_last_line_is_dropped_with_a_note(tmp_path):
    path = tmp_path / "journal.jsonl"
    with small(path) as journal:
        journal.admit("a", version=0)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"n":2,"ev')
    assert list(fold(path).groups) == [0]
    with small(path) as journal:
        assert journal.note == f"{path}: dropped an unfinished last line of 10 bytes"
    assert path.read_bytes().startswith(whole) and len(list(read_lines(path))) == 3
    # A power cut may leave zeros, and more of them than one block.
    path.write_bytes(whole + b"\0" * 100_000)
    with small(path) as journal:
        assert "100000 bytes" in journal.note


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [*lines[:1], b"#" + lines[1][1:], *lines[2:]], r"journal.jsonl:2 is damaged \(not a JSON obj"),
        (
            lambda lines: lines[:1] + lines[2:],
            r"journal.jsonl:2 does not follow .*event 2 stands where event 1 belongs",
        ),
        (
            lambda lines: [*lines[:2], lines[2].replace(b'"id":0', b'"id":1')],
            r"journal.jsonl:3 .*group 1 cannot finish",
        ),
        (lambda lines: [*lines[:2], lines[2].replace(b"finish", b"vanish")], r"journal.jsonl:3 .*'vanish' is unknown"),
        (lambda lines: [*lines[:2], lines[2].replace(b'"id":0,', b"")], r"journal.jsonl:3 .*it lacks 'id'"),
        (
            lambda lines: [*lines[:3], lines[3].replace(b'"id":0', b'"id":7')],
            r"journal.jsonl:4 .*takes group 7 .*but 0",
        ),
        (
            lambda lines: [*lines[:4], lines[4].replace(b"[0]", b"[1]")],
            r"journal.jsonl:5 .*used groups \[1\], but \[0\]",
        ),
    ],
)
def test_damage_is_refused_with_file_and_line(damage, message, tmp_path):
    path = tmp_path / "journal.jsonl"
    with small(path) as journal:
        journal.finish(journal.admit("a", version=0), offset=0)
        journal.take()
        journal.step()
    before = damage(path.read_bytes().splitlines(keepends=True))
    path.write_bytes(b"".join(before))
    with pytest.raises(ValueError, match=message):
        small(path)
    assert path.read_bytes() == b"".join(before)


def test_checkpoint_of_another_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ends at learner step 0, but the checkpoint is of step 5"):
        small(tmp_path / "journal.jsonl", step=5)


def test_what_is_refused_leaves_no_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    with small(path) as journal:
        journal.admit("a", version=0)
        before = path.read_bytes()
        with pytest.raises(ValueError, match="group 3 cannot fail: it is not admitted"):
            journal.fail(3, "no reason")
        with pytest.raises(ValueError, match="used groups"):
            journal._log("step", step=1, ids=[0])
        assert path.read_bytes() == before
        journal.fail(0, "the sandbox died")
    assert fold(path).queue.failed == 1
    with pytest.raises(ValueError, match="window is 0"):
        small(path, window=0)
    with small(path) as journal:
        assert journal.state.events == 4


def test_settings_may_change_with_a_resume(tmp_path):
    path = tmp_path / "journal.jsonl"
    with small(path) as journal:
        for _ in range(4):
            journal.admit("a", version=0)
    with small(path, capacity=5, window=1, pick="input") as journal:
        assert journal.queue.room == 1
        journal.finish(1, offset=0)
        assert journal.take() is None
    assert (fold(path).queue.window, fold(path).queue.pick) == (1, "input")


def test_second_run_in_the_same_workdir_is_refused(tmp_path):
    path = tmp_path / "journal.jsonl"
    with small(path), pytest.raises(BlockingIOError, match=r"journal.jsonl is in use by another run"):
        small(path)
    small(path).close()


def test_full_disk(tmp_path, monkeypatch):
    """A write that runs out of room half way leaves no trace, says so in one sentence, and can be repeated."""
    path = tmp_path / "lines.jsonl"
    real = os.pwrite
    room = [0]

    def pwrite(file, data, offset):
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real(file, data[: room[0]], offset)
        room[0] -= count
        return count

    with JsonLines(path) as lines:
        lines.append({"a": 1}, sync=True)
        monkeypatch.setattr(os, "pwrite", pwrite)
        room[0] = 5
        with pytest.raises(OSError, match=r"lines.jsonl cannot be extended \(No space left on device\): make room"):
            lines.append({"a": 2}, sync=True)
        assert list(read_lines(path)) == [{"a": 1}]
        room[0] = 1000
        lines.append({"a": 3}, sync=True)
    assert list(read_lines(path)) == [{"a": 1}, {"a": 3}]


if __name__ == "__main__":
    drive(Path(sys.argv[1]), pause=0.02)
