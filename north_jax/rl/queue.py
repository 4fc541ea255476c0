"""The anchored windowed FIFO: which finished group the learner takes next.

Groups are admitted in input order and finish in any order. With `head` the oldest group that has not been taken, a
finished group may be taken only while its id lies in [head, head + W - 1]; the window moves when the head leaves.
W = 1 is strict FIFO, W >= capacity is completion order. No id is overtaken by more than W - 1 younger ones. If slots
are released after the learner step that used them, a group is at most floor((N + W - 2) / P) learner steps old when it
is taken (N = capacity, P = groups per learner step), and N / P - 1 on average in a full queue, whatever W is.

Pure logic: no time, no threads, no files. Source: MiniMax-M2, arXiv 2605.26494 §6.2.4.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping

PICKS = ("completion", "input")


def window_size(fraction: float, capacity: int) -> int:
    """W = max(1, floor(fraction * capacity)), in groups."""
    return max(1, math.floor(fraction * capacity))


@dataclasses.dataclass
class _Slot:
    """One admitted group that still holds a slot."""

    step: int  # learner steps done when it was admitted
    status: str = "open"  # open, done, filtered, taken
    finish: int = -1  # place in the order of finishing
    overtaken: int = 0  # younger groups taken before it


@dataclasses.dataclass(frozen=True)
class Taken:
    """A group handed out: `filtered` ones carry no signal, are gone at once and do not count towards a batch.

    lag: learner steps done since it was admitted.
    """

    id: int
    filtered: bool
    lag: int


class WindowedQueue:
    """Groups by id, from admission to release.

    A group is open (its rollouts run), then done or filtered (finished, waiting), then taken (in the learner's hands),
    then trained. An open group can also fail for good. It holds one of `capacity` slots until it is trained, failed,
    or taken as filtered. `pick` chooses among the finished groups of the window: the one that finished first
    ("completion") or the oldest ("input").
    """

    def __init__(self, capacity: int, window: int, pick: str = "completion"):
        if capacity < 1:
            raise ValueError(f"queue capacity is {capacity}, but at least one group must fit: set it to 1 or more")
        if window < 1:
            raise ValueError(f"queue window is {window}, but the head must lie in it: set it to 1 or more")
        if pick not in PICKS:
            raise ValueError(f"queue pick {pick!r} is unknown: use one of {', '.join(PICKS)}")
        self.capacity, self.window, self.pick = capacity, window, pick
        self.next_id = 0
        self.trained = self.filtered = self.failed = 0
        self.max_overtakes = 0
        self._head = 0
        self._finished = 0  # groups that ever finished: the next place in the order of finishing
        self._slots: dict[int, _Slot] = {}
        self._again: list[int] = []  # taken before a resume, to be handed out again in this order

    # Groups and slots.

    @property
    def room(self) -> int:
        """Groups that may be admitted now. 0 while a resume has brought back more groups than `capacity`."""
        return max(0, self.capacity - len(self._slots))

    @property
    def head(self) -> int | None:
        """The oldest group not yet taken, None when there is none."""
        return self._head if self._head < self.next_id else None

    def ids(self, *statuses: str) -> list[int]:
        """Ids that hold a slot and have one of `statuses` (open, done, filtered, taken), oldest first."""
        return [id for id, slot in sorted(self._slots.items()) if slot.status in statuses]

    def admit(self, step: int = 0) -> int:
        """A new open group, admitted after `step` learner steps; returns its id. RuntimeError when there is no room."""
        if not self.room:
            raise RuntimeError(f"all {self.capacity} slots of the queue are taken: release some before admitting more")
        id = self.next_id
        self.next_id += 1
        self._slots[id] = _Slot(step)
        return id

    def finish(self, id: int) -> None:
        """Open -> done: every rollout of the group is terminal."""
        self._finish(id, "done")

    def filter(self, id: int) -> None:
        """Open -> filtered: finished without a learning signal; it leaves when its turn comes."""
        self._finish(id, "filtered")

    def fail(self, id: int) -> None:
        """Open -> gone, for good. A retry keeps its id and stays open instead."""
        self._slot(id, "open", "fail")
        del self._slots[id]
        self.failed += 1
        self._advance()

    def peek(self) -> int | None:
        """The id `take` would hand out now, None when nothing in the window is finished."""
        if self._again:
            return self._again[0]
        ready = [
            id
            for id in range(self._head, min(self._head + self.window, self.next_id))
            if id in self._slots and self._slots[id].status in ("done", "filtered")
        ]
        if not ready:
            return None
        return ready[0] if self.pick == "input" else min(ready, key=lambda id: self._slots[id].finish)

    def take(self, step: int = 0) -> Taken | None:
        """Hands out the next finished group after `step` learner steps, None when there is none in the window."""
        id = self.peek()
        if id is None:
            return None
        slot = self._slots[id]
        if self._again:
            self._again.pop(0)
            return Taken(id, False, step - slot.step)
        filtered = slot.status == "filtered"
        slot.status = "taken"
        for older in range(self._head, id):
            if older in self._slots and self._slots[older].status != "taken":
                self._slots[older].overtaken += 1
                self.max_overtakes = max(self.max_overtakes, self._slots[older].overtaken)
        if filtered:
            del self._slots[id]
            self.filtered += 1
        self._advance()
        return Taken(id, filtered, step - slot.step)

    def release(self, ids: Iterable[int]) -> None:
        """Taken -> trained: the learner step (and export) of the batch they were in is done; frees their slots."""
        for id in ids:
            self._slot(id, "taken", "be released")
            if id in self._again:
                raise ValueError(f"group {id} cannot be released: after the resume it has not been taken again")
            del self._slots[id]
            self.trained += 1

    def rewind(self, steps: Mapping[int, int], step: int) -> None:
        """Hands these groups out again first, in this order: only `step` learner steps count, the later are lost.

        `steps`: id -> learner steps done at its admission, of groups that are taken or were trained. A group that was
        admitted after a lost step counts as admitted after `step`.
        """
        for id in steps:
            if id not in self._slots:
                self._slots[id] = _Slot(steps[id], "taken")
                self.trained -= 1
            self._slot(id, "taken", "be handed out again")
        for slot in self._slots.values():
            slot.step = min(slot.step, step)
        self._again = [*steps, *(id for id in self._again if id not in steps)]

    # Numbers.

    def stats(self, step: int = 0) -> dict[str, int]:
        """Counts of groups, and the head's age in learner steps and in younger groups taken before it."""
        count = dict.fromkeys(("open", "done", "filtered", "taken"), 0)
        for slot in self._slots.values():
            count[slot.status] += 1
        head = self._slots.get(self._head)
        return {
            "admitted": self.next_id,
            "running": count["open"],
            "waiting": count["done"] + count["filtered"] + len(self._again),
            "taken": count["taken"] - len(self._again),
            "trained": self.trained,
            "filtered": self.filtered,
            "failed": self.failed,
            "room": self.room,
            "head_age": step - head.step if head else 0,
            "head_overtaken": head.overtaken if head else 0,
            "max_overtakes": self.max_overtakes,
        }

    def check(self) -> None:
        """Asserts conservation: admitted = trained + filtered + failed + still holding a slot."""
        left = self.trained + self.filtered + self.failed
        assert self.next_id == left + len(self._slots), f"{self.next_id} groups admitted, {left} left, {self._slots}"

    # State.

    def snapshot(self) -> dict:
        """The whole state as plain JSON."""
        return {
            "capacity": self.capacity,
            "window": self.window,
            "pick": self.pick,
            "next_id": self.next_id,
            "head": self._head,
            "trained": self.trained,
            "filtered": self.filtered,
            "failed": self.failed,
            "max_overtakes": self.max_overtakes,
            "finished": self._finished,
            "slots": [[id, *dataclasses.astuple(slot)] for id, slot in self._slots.items()],
            "again": list(self._again),
        }

    @classmethod
    def restore(cls, snapshot: dict) -> "WindowedQueue":
        """The queue `snapshot` was taken of."""
        queue = cls(snapshot["capacity"], snapshot["window"], snapshot["pick"])
        for name in ("next_id", "trained", "filtered", "failed", "max_overtakes"):
            setattr(queue, name, snapshot[name])
        queue._head, queue._finished = snapshot["head"], snapshot["finished"]
        queue._slots = {id: _Slot(*fields) for id, *fields in snapshot["slots"]}
        queue._again = list(snapshot["again"])
        return queue

    def _slot(self, id: int, status: str, verb: str) -> _Slot:
        slot = self._slots.get(id)
        if slot is None or slot.status != status:
            state = slot.status if slot else "gone" if 0 <= id < self.next_id else "not admitted"
            raise ValueError(f"group {id} cannot {verb}: it is {state}, and only {status} groups can")
        return slot

    def _finish(self, id: int, status: str) -> None:
        slot = self._slot(id, "open", "finish")
        slot.status, slot.finish = status, self._finished
        self._finished += 1

    def _advance(self) -> None:
        while self._head < self.next_id and (
            self._head not in self._slots or self._slots[self._head].status == "taken"
        ):
            self._head += 1
