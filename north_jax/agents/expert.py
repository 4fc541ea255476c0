"""Demonstrations: the scripted expert's actions carried out for real, with the observations the sandbox gave."""

import dataclasses
import json
import os
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from north_jax.agents.episode import Episode
from north_jax.agents.harness import HARNESSES, Action, Submit
from north_jax.chat.format import Completion, ToolCall
from north_jax.envs.pool import SandboxPool
from north_jax.envs.sandbox import Sandbox, SandboxDied
from north_jax.envs.tasks import Run, Step, Task, make_task, replacement


def with_mistake(task: Task, rng: random.Random) -> tuple[Step, ...]:
    """The solution with one mistake and its recovery: a misspelt file name, or a first fix that fails the tests."""
    steps = list(task.solution)
    fixes = [i for i, step in enumerate(steps) if step.slip is not None]
    if fixes and rng.random() < 0.5:
        at = fixes[0]
        fix, slip = steps[at].action, steps[at].slip
        steps[at : at + 1] = [
            dataclasses.replace(replacement(fix.path, fix.old, slip), mistake=True),
            steps[at + 1],  # the tests
            replacement(fix.path, slip, fix.new),
        ]
        return tuple(steps)
    name = rng.choice(sorted(task.files)) if task.files else "note.txt"
    wrong = rng.choice("bdfgklm") + rng.choice("aeiou") + name
    return (Step(f"read {wrong}", Run(f"cat {wrong}"), mistake=True), *steps)


def demonstrate(task: Task, harness_name: str, sandbox: Sandbox, steps: Sequence[Step]) -> list[dict]:
    """The conversation of the expert taking these steps and submitting; mistakes carry weight 0.

    Raises RuntimeError when the verifier does not say solved: a demonstration is right or it is none.
    """
    harness = HARNESSES[harness_name]
    episode = Episode(task, harness, sandbox)
    messages = episode.start()
    actions: list[tuple[Action, str, bool]] = [(s.action, s.thought, s.mistake) for s in steps]
    for action, thought, mistake in [*actions, (Submit(), "submit", False)]:
        message = harness.write(action, thought)
        messages.append({**message, "weight": 0.0} if mistake else message)
        calls = tuple(ToolCall(c["name"], c["arguments"]) for c in message.get("tool_calls", ()))
        # A mistake does not count against the budget of a demonstration.
        episode.turns -= mistake
        result = episode.step(Completion(thought, message.get("content"), calls))
        if result.message is not None:
            messages.append(result.message)
    if result.status != "solved":
        raise RuntimeError(
            f"the expert's solution of {task.id} under the {harness_name} harness ended as {result.status!r} "
            f"{result.detail}; mend the task template {task.template!r}"
        )
    return messages


def record(
    path: Path,
    pool: SandboxPool,
    *,
    counts: Mapping[str, int],
    harnesses: Sequence[str],
    mistake_share: float,
    seed: int,
    workers: int,
) -> int:
    """Records counts[template] demonstrations per template to a JSONL file, one conversation a line.

    The file appears whole or not at all; a file that is there already is kept. Returns the number of conversations.
    """
    jobs = [(name, index) for name, count in counts.items() for index in range(count)]
    if path.exists():
        with path.open() as lines:
            return sum(1 for _ in lines)

    def one(job: tuple[str, int]) -> str:
        name, index = job
        task = make_task(name, index, split="train", seed=seed)
        rng = random.Random(f"{seed}/demonstration/{task.id}")
        steps = with_mistake(task, rng) if rng.random() < mistake_share else task.solution
        harness = harnesses[index % len(harnesses)]
        for last_try in (False, False, True):
            try:
                with pool.lend() as sandbox:
                    messages = demonstrate(task, harness, sandbox, steps)
                break
            except SandboxDied:  # killed from outside; the pool starts another
                if last_try:
                    raise
        record = {"task": task.id, "family": task.family, "template": name, "harness": harness, "messages": messages}
        return json.dumps(record, ensure_ascii=False)

    partial = path.with_suffix(".partial")
    with partial.open("w") as out, ThreadPoolExecutor(workers) as threads:
        try:
            for line in tqdm(threads.map(one, jobs), total=len(jobs), desc="demonstrations", unit="episode"):
                out.write(line + "\n")
        finally:
            threads.shutdown(cancel_futures=True)  # Ctrl-C does not wait for the episodes not begun
    os.replace(partial, path)
    return len(jobs)


def read_demonstrations(path: Path) -> list[dict]:
    """The recorded conversations of a file that `record` wrote."""
    with path.open() as lines:
        return [json.loads(line) for line in lines]
