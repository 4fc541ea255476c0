"""Evaluation runs: every task sampled several times with several seeds, kept on disk as they finish."""

import asyncio
import dataclasses
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from north_jax.agents.record import Rollout, rollout_from_json, rollout_to_json
from north_jax.agents.rollout import Sampling, play_to_the_end
from north_jax.chat.format import ChatFormat
from north_jax.data.jsonl import JsonLines, read_lines
from north_jax.envs.pool import SandboxPool
from north_jax.envs.tasks import Task
from north_jax.sampler.fleet import SamplerFleet
from north_jax.sampler.process import SamplerProcess
from north_jax.weights.folder import read_manifest


@dataclasses.dataclass(frozen=True)
class Sample:
    """One rollout wanted: `seed` is the evaluation seed, `number` counts the samples of the task under it."""

    task: Task
    harness: str
    seed: int
    number: int

    @property
    def key(self) -> str:
        return f"{self.task.id}/{self.seed}/{self.number}"

    @property
    def sampling_seed(self) -> int:
        """Fixed by the key, so that a run repeated with the same weights draws the same tokens."""
        return zlib.crc32(self.key.encode()) >> 2


def plan(tasks: Sequence[Task], harnesses: Sequence[str], *, samples: int, seeds: Sequence[int]) -> list[Sample]:
    """`samples` rollouts per task and seed; tasks take the harnesses in turn, a task always the same one."""
    return [
        Sample(task, harnesses[i % len(harnesses)], seed, number)
        for seed in seeds
        for i, task in enumerate(tasks)
        for number in range(samples)
    ]


def evaluate(
    wanted: Sequence[Sample],
    path: Path,
    *,
    checkpoint: Path,
    chat: ChatFormat,
    sampler: SamplerProcess,
    pool: SandboxPool,
    sampling: Sampling,
    label: str,
) -> dict[str, Rollout]:
    """Plays the wanted samples against the sampler serving `checkpoint`; returns {key: rollout}.

    Finished rollouts are appended to `path` and not played again. An episode whose sandbox died is played again.
    """
    done: dict[str, Rollout] = {}
    if path.exists():
        done = {record["key"]: rollout_from_json(record["rollout"]) for record in read_lines(path)}
    missing = [sample for sample in wanted if sample.key not in done]

    async def play() -> None:
        slots = asyncio.Semaphore(pool.size)
        with (
            ThreadPoolExecutor(pool.size) as threads,
            JsonLines(path) as out,
            tqdm(total=len(wanted), initial=len(wanted) - len(missing), desc=label, unit="rollout") as bar,
        ):
            sampler.checkpoint = checkpoint
            await asyncio.to_thread(sampler.ensure_alive)
            fleet = SamplerFleet(
                [sampler],
                folder=checkpoint,
                version=read_manifest(checkpoint)["weight_version"],
                vocab_size=chat.tokenizer.vocab_size,
                context=sampling.context,
            )
            async with fleet:

                async def one(sample: Sample) -> None:
                    async with slots:
                        rollout = await play_to_the_end(
                            sample.task,
                            sample.harness,
                            chat=chat,
                            client=fleet,
                            pool=pool,
                            threads=threads,
                            sampling=sampling,
                            seed=sample.sampling_seed,
                        )
                    done[sample.key] = rollout
                    out.append({"key": sample.key, "rollout": rollout_to_json(rollout)}, sync=False)
                    bar.update()

                await fleet.ready()  # whatever it served before, it has these weights now
                async with asyncio.TaskGroup() as group:
                    for sample in missing:
                        group.create_task(one(sample))

    if missing:
        asyncio.run(play())
    return {sample.key: done[sample.key] for sample in wanted}
