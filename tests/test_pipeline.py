"""The whole line at its smallest, as a user runs it: it finishes, though every process of it is killed once."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from north_jax.rl.journal import fold

ROOT = pathlib.Path(__file__).parents[1]


def start(workdir: pathlib.Path, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "north_jax.main", f"--config={ROOT}/tests/tiny_config.py", f"--workdir={workdir}"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    with open(workdir / "log", "ab") as log:
        return subprocess.Popen([*command, *overrides], cwd=ROOT, stdout=log, stderr=log, env=environment)


def wait_for(condition, process: subprocess.Popen, workdir: pathlib.Path, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, (workdir / "log").read_text()[-3000:]
        assert time.monotonic() < deadline, (workdir / "log").read_text()[-3000:]
        time.sleep(0.1)


def children(pid: int, having: str) -> list[int]:
    """Processes below `pid` whose command line has `having`."""
    found, parents = [], [pid]
    while parents:
        listed = pathlib.Path(f"/proc/{parents.pop()}/task")
        for task in listed.iterdir() if listed.exists() else ():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends while it is looked at
                for child in (task / "children").read_text().split():
                    parents.append(int(child))
                    if having in pathlib.Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace"):
                        found.append(int(child))
    return found


@pytest.mark.timeout(600)
def test_it_finishes_though_every_process_is_killed_once(tmp_path):
    journal = tmp_path / "rl" / "journal.jsonl"

    def rl_step() -> int:
        return fold(journal).step if journal.exists() and journal.stat().st_size else 0

    # The learner itself, in SFT and in RL.
    process = start(tmp_path)
    wait_for(lambda: (tmp_path / "sft" / "checkpoints" / "20").exists(), process, tmp_path)
    process.kill()
    process.wait()
    process = start(tmp_path)
    wait_for(lambda: rl_step() >= 5, process, tmp_path)
    process.kill()
    process.wait()
    lost = rl_step()

    # The sampler and a sandbox of a running learner; then Ctrl-C.
    process = start(tmp_path)
    wait_for(lambda: rl_step() >= 4 and len(children(process.pid, "bwrap")) > 0, process, tmp_path)
    wait_for(lambda: children(process.pid, "north_jax.sampler.server"), process, tmp_path)
    os.kill(children(process.pid, "north_jax.sampler.server")[0], signal.SIGKILL)
    os.kill(children(process.pid, "bwrap")[0], signal.SIGKILL)
    wait_for(lambda: rl_step() >= lost + 2, process, tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, (tmp_path / "log").read_text()[-3000:]
    assert "the same command goes on from here" in (tmp_path / "log").read_text()

    process = start(tmp_path)
    assert process.wait(400) == 0, (tmp_path / "log").read_text()[-3000:]
    assert (tmp_path / "report.html").stat().st_size > 50_000
    results = json.loads((tmp_path / "results.json").read_text())
    queue = results["rl"]["queue"]
    assert queue["admitted"] == queue["trained"] + queue["filtered"] + queue["failed"] + queue["open"]
    assert queue["trained"] == 12 * 2
    state = fold(journal)
    assert state.step == 12 and len({id for id, _ in state.consumed}) == len(state.consumed) == 24

    lines = [json.loads(line) for line in (tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["expert_used_min"] >= 2 and line["expert_load_max"] <= 2 for line in lines)  # 2 of 4 experts

    # Finished: the same command only says so.
    process = start(tmp_path)
    assert process.wait(120) == 0
    assert json.loads((tmp_path / "results.json").read_text())["table"] == results["table"]
