"""The rollout side of a run: a thread that keeps the queue full of groups while the learner trains.

It admits a group whenever the queue has room, plays its members against the sampler in sandboxes, and writes the group
down before the journal calls it finished. Every group ends: trained, filtered (no signal), or failed.
"""

import asyncio
import concurrent.futures
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from north_jax.agents.record import Rollout
from north_jax.agents.rollout import Sampling, play_to_the_end
from north_jax.chat.format import ChatFormat
from north_jax.envs.pool import SandboxPool
from north_jax.envs.tasks import Task
from north_jax.rl.curriculum import Curriculum
from north_jax.rl.groups import Group, GroupFile
from north_jax.rl.journal import Journal
from north_jax.sampler.client import SamplerError
from north_jax.sampler.fleet import SamplerFleet
from north_jax.sampler.process import SamplerProcess

PUSHES = 3  # attempts to hand over weights before the run ends


class Generation:
    """Runs groups of rollouts in the background; the learner takes finished ones with `take`.

    The journal is shared by both threads and guarded by one lock. `version` is the weight version now live.
    """

    SAY_AFTER = 100  # groups in a row without a signal

    def __init__(
        self,
        *,
        journal: Journal,
        file: GroupFile,
        curriculum: Curriculum,
        task_from_id: Callable[[str], Task],
        group_size: int,
        harnesses: tuple[str, ...],
        chat: ChatFormat,
        sampler: SamplerProcess,
        pool: SandboxPool,
        sampling: Sampling,
        version: int,
        seed: int,
    ):
        self.journal, self.file = journal, file
        self._curriculum, self._task_from_id = curriculum, task_from_id
        self._size, self._harnesses = group_size, harnesses
        self._chat, self._sampler, self._pool, self._sampling, self._seed = chat, sampler, pool, sampling, seed
        self.version = version
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._stopping = False
        self._without_signal = 0
        self._ready = threading.Event()
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    # -- the learner's side -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when the sampler serves the run's weights. Raises what stopped the rollout thread, if it stopped."""
        for id, group in self.journal.state.groups.items():  # of the run so far, when it resumes
            if group.status != "open":
                self._observe(id)
        self._thread.start()
        # A resumed run may hold a whole batch already: the learner must not publish weights before there is a client.
        while not self._ready.wait(0.2):
            if self._error is not None:
                raise self._error

    def stop(self) -> None:
        """Ends the rollouts in flight; a resume starts them again under the same ids."""
        self._stopping = True
        self._notify()
        self._thread.join()

    def take(self, groups: int, interrupted: threading.Event) -> list[Group]:
        """The next `groups` groups with signal, waiting for them; fewer once `interrupted` is set.

        Raises what stopped the rollout thread, if it stopped.
        """
        taken: list[Group] = []
        while len(taken) < groups and not interrupted.is_set():
            with self._changed:
                got = self.journal.take()
                if got is None:
                    if self._error is not None:
                        raise self._error
                    self._changed.wait(0.5)
                    continue
            if got.filtered:
                self._notify()  # its slot is free at once
                self._without_signal += 1
                if self._without_signal % self.SAY_AFTER == 0:
                    tqdm.write(
                        f"RL: {self._without_signal} groups in a row carried no signal, their members were all solved "
                        "or all failed; if this goes on, the tasks are out of this model's reach or too easy for it: "
                        "stop, and change config.tasks or train longer in SFT"
                    )
            else:
                self._without_signal = 0
                taken.append(self.file.read(got.id, self.journal.state.groups[got.id].offset))
        return taken

    def stepped(self, **numbers) -> dict[str, int]:
        """The learner step that used all taken groups is done; frees their slots. Returns the queue's stats."""
        with self._changed:
            stats = self.journal.queue.stats(self.journal.step(**numbers))
        self._notify()
        return stats

    def publish(self, path: Path, version: int) -> None:
        """Has the sampler serve the folder `path` as `version`, while rollouts go on; returns when it proved to.

        A sampler that dies of it is started again and given the weights again, a few times.
        """
        if self._error is not None:
            raise self._error
        future = asyncio.run_coroutine_threadsafe(self._push(path, version), self._loop)
        # The push has deadlines of its own; what can keep it from ending is the death of the thread it runs in.
        while not concurrent.futures.wait([future], timeout=1.0).done:
            if self._error is not None:
                raise self._error
        future.result()
        self.version = version
        with self._changed:
            self.journal.export(version)

    # -- the rollout thread -------------------------------------------------------------------------------------------

    async def _push(self, path: Path, version: int) -> None:
        for attempt in range(PUSHES):
            try:
                await self._fleet.push(path, version)
                return
            except SamplerError:
                if attempt == PUSHES - 1:
                    raise

    def _notify(self) -> None:
        if self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(self._wake.set)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._error = error
        with self._changed:
            self._changed.notify_all()

    async def _main(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self._slots = asyncio.Semaphore(self._pool.size)
        with ThreadPoolExecutor(self._pool.size) as threads:
            await asyncio.to_thread(self._sampler.ensure_alive)
            self._fleet = SamplerFleet(
                [self._sampler],
                folder=self._sampler.checkpoint,
                version=self.version,
                vocab_size=self._chat.tokenizer.vocab_size,
                context=self._sampling.context,
            )
            async with self._fleet:
                await self._fleet.ready()
                self._ready.set()
                running: set[asyncio.Task] = set()
                for id in self.journal.state.in_flight():
                    running.add(asyncio.create_task(self._group(id, threads)))
                try:
                    while not self._stopping:
                        for done in [t for t in running if t.done()]:
                            running.remove(done)
                            done.result()  # an unexpected error ends the run, loudly
                        with self._changed:
                            while self.journal.queue.room:
                                task = self._curriculum.task(self.journal.queue.next_id)
                                id = self.journal.admit(task.id, self.version)
                                running.add(asyncio.create_task(self._group(id, threads)))
                        self._wake.clear()
                        wake = asyncio.create_task(self._wake.wait())
                        await asyncio.wait({wake, *running}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                        wake.cancel()
                finally:
                    for task in running:
                        task.cancel()
                    await asyncio.gather(*running, return_exceptions=True)

    async def _group(self, id: int, threads) -> None:
        version = self.version
        task = self._task_from_id(self.journal.state.groups[id].task)
        harness = self._harnesses[id % len(self._harnesses)]
        attempt = self.journal.state.groups[id].attempt
        members = await asyncio.gather(
            *(self._member(id, attempt, number, task, harness, threads) for number in range(self._size))
        )
        valid = sum(member.valid for member in members)
        group = Group(id=id, task=task.id, members=tuple(members), attempt=attempt, version=version)
        offset = self.file.append(group)
        with self._changed:
            if valid < 2:
                self.journal.fail(id, f"{self._size - valid} of {self._size} environments failed")
            elif group.has_signal():
                self.journal.finish(id, offset)
            else:
                self.journal.filter(id, offset)
            self._observe(id)
            self._changed.notify_all()

    def _observe(self, id: int) -> None:
        group = self.journal.state.groups[id]
        rewards = [reward for status, reward in group.members.values() if status != "environment_failure"]
        solved = sum(reward > 0 for reward in rewards)
        self._curriculum.observe(self._task_from_id(group.task).template, solved, len(rewards) - solved)

    async def _member(self, id: int, attempt: int, number: int, task: Task, harness: str, threads) -> Rollout:
        async with self._slots:
            rollout = await play_to_the_end(
                task,
                harness,
                chat=self._chat,
                client=self._fleet,
                pool=self._pool,
                threads=threads,
                sampling=self._sampling,
                seed=zlib.crc32(f"{self._seed}/{id}/{number}/{attempt}".encode()) >> 2,
            )
        with self._changed:
            self.journal.member(id, number, rollout.status, rollout.reward)
        return rollout
