"""The journal of an asynchronous run: every event on disk before it acts, and the run's state as the fold of them.

Events, one JSON object a line, each with its number `n`, its `time` (seconds since the epoch) and its `event`:

open      step, capacity, window, pick       a process starts from the checkpoint after learner step `step`
admit     id, task, step, version            a group enters the queue under exported weights `version`
member    id, attempt, member, status, reward   one rollout of a group is terminal
retry     id, attempt, reason                the group starts over as attempt `attempt`
finish    id, offset                         all rollouts are terminal and stored at `offset` of the rollouts file
filter    id, offset                         the same, without a learning signal
fail      id, reason                         the group leaves for good
take      id, step                           the group goes to the batch of learner step `step` (1 is the first)
step      step, ids, ...                     learner step `step` is done with these groups
export    step, version                      weights after learner step `step` are live as `version`

A line is one write, so it survives the death of the process; open, step and export are also flushed to the device
(fsync), so a power cut costs at most the rollouts since the last step. A last line without its end never acted and is
dropped; any other damage is refused.
"""

import collections
import dataclasses
import os
import time

from north_jax.data.jsonl import JsonLines, read_lines
from north_jax.rl.queue import Taken, WindowedQueue

EVENTS = ("open", "admit", "member", "retry", "finish", "filter", "fail", "take", "step", "export")
_SYNCED = ("open", "step", "export")


@dataclasses.dataclass
class GroupState:
    """What the journal knows of one group. status: open, done, filtered, failed, taken, trained."""

    task: str
    step: int
    version: int
    attempt: int = 0
    status: str = "open"
    offset: int | None = None
    members: dict[int, tuple[str, float]] = dataclasses.field(default_factory=dict)  # of this attempt


class RunState:
    """The fold of a journal: the queue, every group, the learner steps done, the weights that are live."""

    def __init__(self):
        self.queue: WindowedQueue | None = None
        self.groups: dict[int, GroupState] = {}
        self.step = 0
        self.version: int | None = None
        self.consumed: list[tuple[int, int]] = []  # (group, learner step), in the order of taking, of steps that count
        self.lags: list[int] = []  # learner steps between admission and taking, beside `consumed`
        self.statuses: collections.Counter[str] = collections.Counter()  # of all terminal rollouts
        self.events = 0

    def apply(self, event: dict) -> Taken | None:
        """The one transition function, for live events and for those read back. ValueError where it cannot be."""
        kind = event["event"]
        if kind not in EVENTS:
            raise ValueError(f"event {kind!r} is unknown")
        if event["n"] != self.events:
            raise ValueError(f"event {event['n']} stands where event {self.events} belongs")
        if kind != "open" and self.queue is None:
            raise ValueError(f"{kind} comes before the first open")
        taken = getattr(self, f"_{kind}")(event)
        self.events += 1
        return taken

    def in_flight(self) -> dict[int, GroupState]:
        """Groups whose rollouts have to run, oldest first."""
        return {id: self.groups[id] for id in self.queue.ids("open")}

    def held(self) -> list[int]:
        """Groups taken for the learner step under way, in the order of taking."""
        return [id for id, step in self.consumed if step == self.step + 1]

    def _open(self, event):
        step = event["step"]
        if step > self.step:
            raise ValueError(f"open at learner step {step}, but only {self.step} steps are known")
        if self.queue is None:
            self.queue = WindowedQueue(event["capacity"], event["window"], event["pick"])
        else:
            settings = {name: event[name] for name in ("capacity", "window", "pick")}
            self.queue = WindowedQueue.restore(self.queue.snapshot() | settings)
        # Steps after the checkpoint are lost: what they used is handed out again, first and in the same order.
        kept = [step_taken <= step for _, step_taken in self.consumed]
        again = [id for (id, _), keep in zip(self.consumed, kept, strict=True) if not keep]
        self.consumed = [entry for entry, keep in zip(self.consumed, kept, strict=True) if keep]
        self.lags = [lag for lag, keep in zip(self.lags, kept, strict=True) if keep]
        self.step = step
        for id in again:
            self.groups[id].status = "done"
        self.queue.rewind({id: self.groups[id].step for id in again}, step)
        for group in self.in_flight().values():
            group.attempt += 1
            group.members = {}

    def _admit(self, event):
        id = self.queue.admit(event["step"])
        if id != event["id"]:
            raise ValueError(f"admits group {event['id']}, but the next group is {id}")
        self.groups[id] = GroupState(event["task"], event["step"], event["version"])

    def _member(self, event):
        group = self._group(event)
        if event["attempt"] == group.attempt:
            group.members[event["member"]] = (event["status"], event["reward"])
        self.statuses[event["status"]] += 1

    def _retry(self, event):
        group = self._group(event)
        if group.status != "open" or event["attempt"] != group.attempt + 1:
            raise ValueError(f"group {event['id']} is {group.status} in attempt {group.attempt}: it cannot be retried")
        group.attempt, group.members = event["attempt"], {}

    def _finish(self, event):
        self.queue.finish(event["id"])
        self.groups[event["id"]].status = "done"
        self.groups[event["id"]].offset = event["offset"]

    def _filter(self, event):
        self.queue.filter(event["id"])
        self.groups[event["id"]].status = "filtered"
        self.groups[event["id"]].offset = event["offset"]

    def _fail(self, event):
        self.queue.fail(event["id"])
        self.groups[event["id"]].status = "failed"

    def _take(self, event):
        if (id := self.queue.peek()) != event["id"] or event["step"] != self.step + 1:
            raise ValueError(
                f"takes group {event['id']} for step {event['step']}, but {id} is next and {self.step} steps are done"
            )
        taken = self.queue.take(self.step)
        if not taken.filtered:
            self.groups[taken.id].status = "taken"
            self.consumed.append((taken.id, event["step"]))
            self.lags.append(taken.lag)
        return taken

    def _step(self, event):
        if event["step"] != self.step + 1 or event["ids"] != self.held():
            raise ValueError(f"step {event['step']} used groups {event['ids']}, but {self.held()} are taken")
        self.queue.release(event["ids"])
        for id in event["ids"]:
            self.groups[id].status = "trained"
        self.step = event["step"]
        self.queue.check()

    def _export(self, event):
        self.version = event["version"]

    def _group(self, event) -> GroupState:
        if event["id"] not in self.groups:
            raise ValueError(f"group {event['id']} was never admitted")
        return self.groups[event["id"]]


def fold(path: str | os.PathLike) -> RunState:
    """The state at the end of a journal file, which is only read; an unfinished last line is ignored.

    Raises ValueError naming file and line where the journal is damaged, has a gap or contradicts itself.
    """
    state = RunState()
    for number, event in enumerate(read_lines(path), 1):
        try:
            state.apply(event)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise ValueError(
                f"{path}:{number} does not follow from the lines before it ({reason}): "
                "restore the file from a copy, or start in a new workdir"
            ) from error
    return state


class Journal:
    """The event log of a run and its state: every method writes its event, then applies it.

    Opening resumes from the checkpoint after learner step `step`: groups taken for later steps are handed out again
    first, in their old order; finished groups wait as they did; groups in flight keep their id and start attempt + 1
    (`state.in_flight()`). More than `capacity` groups may then hold a slot, and none is admitted until they are fewer.
    Open one journal per workdir at a time.
    """

    def __init__(self, path: str | os.PathLike, *, step: int, capacity: int, window: int, pick: str = "completion"):
        self._lines = JsonLines(path)
        self.note = self._lines.note
        try:
            self.state = fold(path)
            if step > self.state.step:
                raise ValueError(
                    f"{path} ends at learner step {self.state.step}, but the checkpoint is of step {step}: "
                    "they are of different runs; start in a new workdir"
                )
            self._log("open", step=step, capacity=capacity, window=window, pick=pick)
        except BaseException:
            self._lines.close()
            raise

    @property
    def queue(self) -> WindowedQueue:
        """The queue, to be asked only: room, peek, stats."""
        return self.state.queue

    def admit(self, task: str, version: int) -> int:
        """A new group of rollouts of `task`; returns its id. RuntimeError when the queue has no room."""
        if not self.queue.room:
            raise RuntimeError(f"all {self.queue.capacity} slots of the queue are taken: admit when `room` is not 0")
        id = self.queue.next_id
        self._log("admit", id=id, task=task, step=self.state.step, version=version)
        return id

    def member(self, id: int, member: int, status: str, reward: float) -> None:
        """Rollout `member` of the group's present attempt is terminal."""
        self._log("member", id=id, attempt=self.state.groups[id].attempt, member=member, status=status, reward=reward)

    def retry(self, id: int, reason: str) -> int:
        """The group starts over under the same id; returns its new attempt."""
        attempt = self.state.groups[id].attempt + 1
        self._log("retry", id=id, attempt=attempt, reason=reason)
        return attempt

    def finish(self, id: int, offset: int) -> None:
        """All rollouts are terminal and stored, synced, at `offset` of the rollouts file."""
        self._log("finish", id=id, offset=offset)

    def filter(self, id: int, offset: int) -> None:
        """As `finish`, of a group without a learning signal."""
        self._log("filter", id=id, offset=offset)

    def fail(self, id: int, reason: str) -> None:
        """The group leaves for good."""
        self._log("fail", id=id, reason=reason)

    def take(self) -> Taken | None:
        """The next finished group for the learner step to come, None when the window has none."""
        id = self.queue.peek()
        return None if id is None else self._log("take", id=id, step=self.state.step + 1)

    def step(self, **numbers) -> int:
        """The learner step with all groups taken for it is done; `numbers` go on the line. Returns the step."""
        self._log("step", step=self.state.step + 1, ids=self.state.held(), **numbers)
        return self.state.step

    def export(self, version: int) -> None:
        """The present weights are live in the sampler as `version`."""
        self._log("export", step=self.state.step, version=version)

    def close(self) -> None:
        """Flushes to the device and closes the file."""
        self._lines.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _log(self, event: str, **fields) -> Taken | None:
        record = {"n": self.state.events, "time": round(time.time(), 3), "event": event, **fields}
        offset = self._lines.append(record, sync=event in _SYNCED)
        try:
            return self.state.apply(record)
        except ValueError:
            self._lines.cut(offset)  # refused, so it did not happen
            raise
