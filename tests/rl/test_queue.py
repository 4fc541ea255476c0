"""The windowed queue against the recorded traces (folder NORTH_ORACLE) and its invariants."""

import collections
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from north_jax.rl.queue import WindowedQueue, window_size

FILE = Path(os.environ.get("NORTH_ORACLE", Path(__file__).parents[1] / "data" / "oracle")) / "fifo_traces.json"
TRACES = collections.defaultdict(list, json.loads(FILE.read_text()) if FILE.exists() else {})
NO_CASES = f"{FILE} is not there or has no such cases: name its folder in NORTH_ORACLE"

# The sliding window ("prefix") is another policy, without a bound on overtaking; the queue does not have it.
NOT_IMPLEMENTED = {"prefix"}


def make_queue(expect: dict, n: int) -> WindowedQueue:
    """All modes are windows of one queue: strict FIFO is W = 1, completion order is W = n."""
    window = {"fifo": 1, "completion": n}.get(expect["mode"], expect["W"])
    queue = WindowedQueue(n, window, expect["pick"])
    for _ in range(n):
        queue.admit()
    return queue


def happen(queue: WindowedQueue, event) -> None:
    kind, id = event if isinstance(event, list) else ("done", event)
    {"done": queue.finish, "filter": queue.filter, "fail": queue.fail}[kind](id)


def drain(queue: WindowedQueue) -> list[int]:
    return [taken.id for taken in iter(queue.take, None)]


def expectations(section: str):
    cases = []
    for number, trace in enumerate(TRACES[section]):
        for expect in trace["expect"]:
            if expect["mode"] not in NOT_IMPLEMENTED:
                name = f"{number}-{trace['name']}-{expect['mode']}-{expect['W']}-{expect['pick']}"
                cases.append(pytest.param(trace, expect, id=name))
    return cases or [pytest.param(None, None, marks=pytest.mark.skip(reason=NO_CASES))]


def cases(section: str):
    return TRACES[section] or [pytest.param(None, marks=pytest.mark.skip(reason=NO_CASES))]


@pytest.mark.parametrize("case", cases("window_size"), ids=str)
def test_window_size(case):
    assert window_size(case["f"], case["N"]) == case["W"]


@pytest.mark.parametrize(("trace", "expect"), expectations("eager"))
def test_eager_trace(trace, expect):
    queue = make_queue(expect, trace["n"])
    consumed = []
    for number, event in enumerate(trace["events"]):
        happen(queue, event)
        taken = drain(queue)
        consumed += taken
        if "steps" in expect:
            step = expect["steps"][number]
            assert (event, taken, queue.head) == (step["event"], step["taken"], step["head_after"])
    assert consumed == expect["consumed"]
    queue.check()


@pytest.mark.parametrize(("trace", "expect"), expectations("paced"))
def test_paced_trace(trace, expect):
    """Groups are taken as they come, also while the learner is busy; every P of them make a step of duration D."""
    queue = make_queue(expect, len(trace["finish_time"]))
    taken = []  # (time, id)
    for time, id in sorted((time, id) for id, time in enumerate(trace["finish_time"])):
        queue.finish(id)
        taken += [(time, id) for id in drain(queue)]
    steps, free, idle = [], 0.0, 0.0
    for first in range(0, len(taken), trace["P"]):
        batch = taken[first : first + trace["P"]]
        start = max(free, batch[-1][0])
        steps.append({"start": start, "groups": [id for _, id in batch]})
        queue.release(id for _, id in batch)
        idle += start - free
        free = start + trace["D"]
    assert steps == expect["steps"]
    assert [id for _, id in taken] == expect["order"]
    assert idle == expect["trainer_idle_before_last_step"]
    assert queue.trained == len(trace["finish_time"])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 10), st.integers(1, 4), st.permutations(range(12)), st.data())
def test_completion_order_does_not_depend_on_when_the_learner_takes(window, busy, finishes, data):
    """With the pick "completion" a busy learner that takes late gets the order of one that takes at once."""
    eager, late = (WindowedQueue(12, window) for _ in range(2))
    eager_order, late_order = [], []
    for queue in (eager, late):
        for _ in range(12):
            queue.admit()
    for id in finishes:
        eager.finish(id)
        eager_order += drain(eager)
        late.finish(id)
        for _ in range(data.draw(st.integers(0, busy))):
            if taken := late.take():
                late_order.append(taken.id)
    assert eager_order == late_order + drain(late)


@pytest.mark.parametrize("case", cases("resume"), ids=lambda case: case and f"{case['name']}-{case['after_events']}")
def test_resume_snapshot(case):
    queue = make_queue(case | {"mode": "anchored"}, case["n"])
    for id in case["taken"]:
        queue.finish(id)
        assert drain(queue) == [id]
    for id in case["finished_waiting_in_completion_order"]:
        queue.finish(id)
        assert drain(queue) == []
    assert queue.ids("open") == case["open"]

    queue = WindowedQueue.restore(json.loads(json.dumps(queue.snapshot())))
    consumed = drain(queue)
    for event in case["remaining_events"]:
        happen(queue, event)
        consumed += drain(queue)
    assert consumed == case["consumed_after_resume"]


class Model:
    """What the queue must do, said the long way round, from the whole history instead of a state."""

    def __init__(self, capacity: int, window: int, pick: str):
        self.capacity, self.window, self.pick = capacity, window, pick
        self.admitted, self.finished, self.filtered, self.failed, self.taken, self.released = 0, [], set(), [], [], []
        self.taken_before_failure = {}

    def expected_take(self):
        gone = {*self.taken, *self.failed}
        head = min((id for id in range(self.admitted) if id not in gone), default=None)
        ready = [id for id in self.finished if id not in gone and id < head + self.window]
        return (min(ready) if self.pick == "input" else ready[0]) if ready else None

    def overtakes(self, id: int) -> int:
        """Younger ids taken before this one left, whichever way it did."""
        taken_before = self.taken_before_failure.get(id, self.taken)
        if id in self.taken:
            taken_before = self.taken[: self.taken.index(id)]
        return sum(other > id for other in taken_before)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 14),
    st.sampled_from(["completion", "input"]),
    st.lists(st.tuples(st.sampled_from("adddftttrs"), st.integers(0, 99)), max_size=120),
)
def test_invariants(capacity, window, pick, actions):
    """Random histories: who is taken, who is overtaken, conservation, room; a snapshot at any point changes nothing."""
    queue, model = WindowedQueue(capacity, window, pick), Model(capacity, window, pick)

    def open_id(number):
        ids = queue.ids("open")
        return ids[number % len(ids)] if ids else None

    for action, number in actions:
        if action == "a" and queue.room:
            assert queue.admit() == model.admitted
            model.admitted += 1
        elif action == "d" and (id := open_id(number)) is not None:
            if number % 4:
                queue.finish(id)
            else:
                queue.filter(id)
                model.filtered.add(id)
            model.finished.append(id)
        elif action == "f" and (id := open_id(number)) is not None:
            queue.fail(id)
            model.failed.append(id)
            model.taken_before_failure[id] = list(model.taken)
        elif action == "t":
            expected, taken = model.expected_take(), queue.take()
            assert (taken.id if taken else None) == expected
            if taken:
                assert taken.id not in model.taken
                assert taken.filtered == (taken.id in model.filtered)
                model.taken.append(taken.id)
                if taken.filtered:
                    model.released.append(taken.id)
        elif action == "r" and (ids := queue.ids("taken")):
            queue.release(ids)
            model.released += ids
        elif action == "s":
            queue = WindowedQueue.restore(json.loads(json.dumps(queue.snapshot())))
        queue.check()
        holding = model.admitted - len(model.failed) - len(model.released)
        assert queue.room == max(0, capacity - holding)

    # Everything leaves, each exactly once, and nobody was overtaken by W or more.
    for id in queue.ids("open"):
        queue.finish(id)
    while taken := queue.take():
        model.taken.append(taken.id)
    queue.release(queue.ids("taken"))
    assert sorted(model.taken + model.failed) == list(range(model.admitted))
    assert queue.trained + queue.filtered + queue.failed == model.admitted
    assert max((model.overtakes(id) for id in range(model.admitted)), default=0) <= window - 1
    assert queue.max_overtakes <= window - 1
    assert queue.head is None


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.floats(0, 1), st.randoms(use_true_random=False))
def test_lag_bound(per_step, batches, fraction, random):
    """A full queue whose slots are freed after the step: lag <= floor((N + W - 2) / P), and N / P - 1 on average."""
    capacity = per_step * batches
    window = window_size(fraction, capacity)
    queue = WindowedQueue(capacity, window)
    lags = []
    for step in range(60):
        while queue.room:
            queue.admit(step)
        batch = []
        while len(batch) < per_step:
            if taken := queue.take(step):
                batch.append(taken.id)
                lags.append(taken.lag)
            else:
                queue.finish(random.choice(queue.ids("open")))
        queue.release(batch)
    assert max(lags) <= math.floor((capacity + window - 2) / per_step)
    assert sum(lags) / len(lags) == pytest.approx(batches - 1, abs=0.1 * batches)


def test_groups_of_lost_steps_come_back_first_and_in_their_order():
    queue = WindowedQueue(6, 3)
    for _ in range(6):
        queue.admit(0)
    for id in (2, 1, 0, 3):
        queue.finish(id)
    assert [queue.take(0).id for _ in range(4)] == [2, 1, 0, 3]
    queue.release([2, 1, 0])
    assert (queue.trained, queue.room) == (3, 3)
    assert queue.admit(1) == 6

    queue.rewind({1: 0, 0: 0, 3: 0}, 0)
    queue.check()
    queue = WindowedQueue.restore(json.loads(json.dumps(queue.snapshot())))
    assert (queue.trained, queue.room) == (1, 0)
    assert queue.stats(0)["waiting"] == 3
    with pytest.raises(ValueError, match="group 1 cannot be released: after the resume it has not been taken again"):
        queue.release([1])
    queue.finish(4)
    assert [taken.id for taken in iter(queue.take, None)] == [1, 0, 3, 4]
    queue.release([1, 0, 3, 4])
    queue.check()
    assert queue.trained == 5
    assert queue.ids("open") == [5, 6]


def test_stats():
    queue = WindowedQueue(5, 2)
    for _ in range(4):
        queue.admit(3)
    queue.finish(1)
    queue.filter(2)
    assert queue.take(7).lag == 4
    assert queue.take(7) is None
    assert queue.stats(7) == {
        "admitted": 4,
        "running": 2,
        "waiting": 1,
        "taken": 1,
        "trained": 0,
        "filtered": 0,
        "failed": 0,
        "room": 1,
        "head_age": 4,
        "head_overtaken": 1,
        "max_overtakes": 1,
    }


def test_misuse_is_refused_by_name():
    queue = WindowedQueue(1, 1)
    queue.admit()
    with pytest.raises(RuntimeError, match="all 1 slots of the queue are taken"):
        queue.admit()
    with pytest.raises(ValueError, match="group 3 cannot finish: it is not admitted"):
        queue.finish(3)
    queue.finish(0)
    with pytest.raises(ValueError, match="group 0 cannot fail: it is done, and only open groups can"):
        queue.fail(0)
    queue.take()
    queue.release([0])
    with pytest.raises(ValueError, match="group 0 cannot be released: it is gone"):
        queue.release([0])
    for arguments, message in (((0, 1), "capacity is 0"), ((1, 0), "window is 0"), ((1, 1, "random"), "'random'")):
        with pytest.raises(ValueError, match=message):
            WindowedQueue(*arguments)
