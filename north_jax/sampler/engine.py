"""The embedded sampler: continuous batching over cache slots, with the trainer's own decoder and key-value cache."""

import collections
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx

from north_jax.model.cache import init_cache
from north_jax.model.decoder import Decoder
from north_jax.sampler.programs import DECODE_STEPS, Programs, empty_rows
from north_jax.sampler.sampling import MAX_STOP_IDS, Sampling

PAUSE_MODES = ("abort", "retract", "in_place")
# A shared prefix shorter than this is computed again rather than copied.
MIN_SHARED = 16
COUNTERS = (
    "requests",
    "generated_tokens",
    "prefill_tokens",
    "cached_tokens",
    "prefill_calls",
    "decode_steps",
    "aborts",
    "swaps",
    "warm_up_seconds",
    "prefill_seconds",
    "decode_seconds",
    "swap_seconds",
)


@dataclasses.dataclass
class Result:
    """One finished completion. `spans` are (version, start, end), half-open over the output tokens.

    `finish` is ("stop", token id), ("length", number of tokens) or ("abort", message). `retractions` counts how often
    its keys and values were thrown away to be computed again.
    """

    rid: str
    prompt_tokens: int
    ids: list[int]
    logprobs: list[float]
    spans: list[tuple[str, int, int]]
    finish: tuple[str, Any]
    cached_tokens: int
    retractions: int
    version: str
    seconds: float


@dataclasses.dataclass(eq=False)
class _Request:
    rid: str
    tokens: list[int]  # the prompt, then the completion
    prompt_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    future: concurrent.futures.Future
    born: float
    logprobs: list[float] = dataclasses.field(default_factory=list)
    spans: list[list] = dataclasses.field(default_factory=list)
    cached: int | None = None
    retractions: int = 0


class Engine:
    """Generates for many requests at once over `slots` cache slots of `context` tokens each.

    One thread owns all state and the device; every public method hands it a message and is safe from any thread.
    A completion's keys and values stay in its slot after it ends, and a new prompt starts from the longest common
    prefix that any slot holds under the same weights: its own earlier turn, or the prompt its group shares.
    """

    def __init__(self, model: Decoder, *, slots: int, context: int, version: str, eos_ids: Iterable[int] = ()):
        if slots < 1 or context < 8:
            raise ValueError(f"slots={slots}, context={context}: an engine needs at least 1 slot of 8 tokens")
        self.slots, self.context, self.version = slots, context, version
        self.config = model.config
        self.eos_ids = frozenset(eos_ids)
        self._graph, params = nnx.split(model)
        self._params = jax.device_put(params)
        self._cache = init_cache(model.config, slots, context, self.dtype)
        # Slot b has the keys and values of the first filled[b] of the known[b] ids in held_BT[b]. Those of a mixed
        # slot come from more than one version of the weights, so no other request may start from them.
        self._held_BT = np.zeros((slots, context), np.int32)
        self._known_B = np.zeros(slots, np.int64)
        self._filled_B = np.zeros(slots, np.int64)
        self._mixed_B = np.zeros(slots, bool)
        self._used_B = np.zeros(slots, np.int64)
        self._clock = 0
        self._running: dict[int, _Request] = {}
        self._waiting: collections.deque[_Request] = collections.deque()
        self._open: set[_Request] = set()  # both of them, and whatever is between
        self._paused = False
        self._counters: collections.Counter[str] = collections.Counter()
        self._messages: collections.deque[tuple[Callable, concurrent.futures.Future]] = collections.deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="sampler-engine", daemon=True)

    # --- any thread ---

    def start(self) -> None:
        """Compile every program, then serve. Returns when warm; raises RuntimeError if the warm-up failed."""
        self._thread.start()
        self.call(lambda: None).result()

    def stop(self) -> None:
        """End the thread; open requests finish as aborted."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def join(self) -> None:
        """Wait until the engine's thread has ended. Errors: RuntimeError where it died."""
        self._thread.join()
        if self._error is not None:
            raise RuntimeError(f"the sampling engine has stopped: {self._error}") from self._error

    @property
    def dtype(self):
        """The type of the weights."""
        return jax.tree.leaves(self._params)[0].dtype

    @property
    def alive(self) -> bool:
        """Whether the engine's thread serves."""
        return self._thread.is_alive() and self._error is None and not self._stopping

    def call(self, function: Callable[[], Any]) -> concurrent.futures.Future:
        """Run `function` on the engine's thread between two device calls; the future holds its value or exception."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._wake:
            if self._error is not None or self._stopping:
                future.set_exception(RuntimeError(f"the sampling engine has stopped: {self._error or 'shut down'}"))
            else:
                self._messages.append((function, future))
                self._wake.notify()
        return future

    def submit(self, rid: str, ids: list[int], sampling: Sampling) -> concurrent.futures.Future:
        """Queue a prompt; the future resolves to a Result.

        `max_new_tokens` is cut to what the context leaves. Errors: ValueError, at once, for a prompt that is empty,
        has an id outside the vocabulary or fills the context, and for more stop ids than fit.
        """
        self.check(ids, sampling)
        sampling = dataclasses.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, self.context - len(ids)))
        future: concurrent.futures.Future = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled; `abort` ends a request
        request = _Request(rid, list(ids), len(ids), sampling, self._stop_ids(sampling), future, time.monotonic())

        def refuse_if_stopped(queued: concurrent.futures.Future):
            if queued.exception() is not None:
                future.set_exception(queued.exception())

        def queue():
            self._open.add(request)
            self._waiting.append(request)

        self.call(queue).add_done_callback(refuse_if_stopped)
        return future

    def check(self, ids: list[int], sampling: Sampling) -> None:
        """Raise what `submit` would raise, and queue nothing."""
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise ValueError("input_ids must be a non-empty list of whole numbers")
        if min(ids) < 0 or max(ids) >= self.config.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self.config.vocab_size)
            raise ValueError(f"token id {bad} in input_ids is outside the vocabulary of {self.config.vocab_size}")
        if len(ids) >= self.context:
            raise ValueError(
                f"the prompt of {len(ids)} tokens leaves no room in the context of {self.context} tokens; shorten it"
            )
        if (count := len(self._stop_ids(sampling))) > MAX_STOP_IDS:
            raise ValueError(f"{count} stop ids with the model's own; at most {MAX_STOP_IDS} fit, drop some")

    def _stop_ids(self, sampling: Sampling) -> frozenset[int]:
        return frozenset() if sampling.ignore_eos else self.eos_ids.union(sampling.stop_token_ids)

    def abort(self, rid: str | None) -> concurrent.futures.Future:
        """End the request `rid` (None: every request) with the tokens it has so far, finish type abort."""
        return self.call(lambda: self._abort(rid))

    def pause(self, mode: str) -> concurrent.futures.Future:
        """Stop drawing until `resume`. Requests that are running: "abort" ends them, "retract" puts them back in the
        queue without their slots, "in_place" leaves them where they are. Errors: ValueError for another mode.
        """
        if mode not in PAUSE_MODES:
            raise ValueError(f"pause mode {mode!r} is not known; choose one of {', '.join(PAUSE_MODES)}")

        def pause():
            self._paused = True
            if mode == "abort":
                self._abort(None)
            elif mode == "retract":
                self._retract()

        return self.call(pause)

    def resume(self) -> concurrent.futures.Future:
        """Go on after `pause`."""
        return self.call(lambda: setattr(self, "_paused", False))

    def flush(self) -> concurrent.futures.Future:
        """Forget every cached prefix. The future holds whether it was done: not while requests run."""
        return self.call(lambda: not self._running and self._forget())

    def swap(self, model: Decoder, version: str, *, flush_cache: bool = True) -> concurrent.futures.Future:
        """Replace the weights between two device calls; running requests go on under the new ones.

        With `flush_cache` the keys and values of what they have so far are computed again under the new weights,
        without it they are kept. The future holds ValueError where the model's configuration is another.
        """
        params = jax.block_until_ready(jax.device_put(nnx.split(model)[1]))
        return self.call(lambda: self._swap(model.config, params, version, flush_cache))

    def stats(self) -> concurrent.futures.Future:
        """Counters since the start (tokens, calls, steps, seconds, programs compiled) and the present queue."""

        def read() -> dict[str, Any]:
            now = {"running": len(self._running), "queue_length": len(self._waiting), "paused": self._paused}
            counters = {name: self._counters[name] for name in COUNTERS}
            return counters | {"compilations": self._programs.compilations} | now

        return self.call(read)

    # --- the engine's thread ---

    def _loop(self) -> None:
        try:
            started = time.monotonic()
            self._programs = Programs(self._graph, self._params, self._cache)
            self._decode_some()  # draws nothing; the first call of a program sets up its buffers
            self._counters["warm_up_seconds"] = time.monotonic() - started
            while not self._stopping:
                self._answer_messages()
                if self._paused:
                    continue
                self._admit()
                if pending := [b for b, request in self._running.items() if self._unfilled(b, request)]:
                    self._prefill_some(pending)
                elif self._running:
                    self._decode_some()
            self._abort(None)
        except BaseException as error:  # told to whoever waits: this thread has nobody else to tell
            self._error = error
        failure = RuntimeError(f"the sampling engine has stopped: {self._error or 'shut down'}")
        with self._wake:
            futures = [future for _, future in self._messages]
            self._messages.clear()
        for future in futures + [request.future for request in self._open]:
            future.set_exception(failure)

    def _answer_messages(self) -> None:
        with self._wake:
            while not self._messages and not self._stopping and (self._paused or not (self._running or self._waiting)):
                self._wake.wait()
            messages = list(self._messages)
            self._messages.clear()
        for function, future in messages:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    def _unfilled(self, slot: int, request: _Request) -> int:
        # The last token's key and value are written by the decode step that draws the next one.
        return len(request.tokens) - 1 - int(self._filled_B[slot])

    def _admit(self) -> None:
        """Give waiting requests the free slots, each starting from the longest prefix that some slot holds."""
        free = sorted((b for b in range(self.slots) if b not in self._running), key=lambda b: (self._used_B[b], b))
        held_back: list[_Request] = []
        copies: list[tuple[int, int, int]] = []
        while self._waiting and free:
            request = self._waiting.popleft()
            wanted = np.array(request.tokens[:-1], np.int32)
            equal_BT = self._held_BT[:, : len(wanted)] == wanted
            same_B = np.minimum(np.cumprod(equal_BT, axis=1).sum(axis=1), self._known_B)
            same_B[self._mixed_B] = 0
            shared_B = np.minimum(same_B, self._filled_B)
            source = int(shared_B.argmax())
            shared = int(shared_B[source])
            if same_B.max() >= shared + MIN_SHARED:
                held_back.append(request)  # a group member is computing this prefix now; copy it when it is there
                continue
            if source in free and 2 * shared >= self._filled_B[source]:
                slot = source
            else:
                slot = free[0]
                if shared >= MIN_SHARED:
                    copies.append((source, slot, shared))
                else:
                    shared = 0
            self._filled_B[slot] = shared if slot == source else 0
            free.remove(slot)
            self._running[slot] = request
            self._held_BT[slot, : len(request.tokens)] = request.tokens
            self._known_B[slot] = len(request.tokens)
            self._mixed_B[slot] = False
            if request.cached is None:
                request.cached = min(shared, request.prompt_tokens)
                self._counters["cached_tokens"] += request.cached
        self._waiting.extendleft(reversed(held_back))
        if copies:
            self._cache = self._programs.copy(self._cache, [(source, slot) for source, slot, _ in copies])
            for _, slot, shared in copies:
                self._filled_B[slot] = shared

    def _prefill_some(self, pending: list[int]) -> None:
        """One prefill call, in the shape that wastes least on what is pending."""
        needs = [self._unfilled(slot, self._running[slot]) for slot in pending]

        def worth(shape: tuple[int, int]) -> float:
            P, S = shape
            return sum(min(need, S) for need in needs[:P]) / (P * S + 32)  # 32: what a call costs beyond its tokens

        P, S = max(self._programs.prefill_shapes, key=worth)
        ids_PS, positions_PS = np.zeros((P, S), np.int32), np.full((P, S), -1, np.int32)
        slots_P = np.zeros(P, np.int32)
        started = time.monotonic()
        for row, (slot, need) in enumerate(zip(pending[:P], needs[:P], strict=True)):
            start, count = int(self._filled_B[slot]), min(need, S)
            ids_PS[row, :count] = self._running[slot].tokens[start : start + count]
            positions_PS[row, :count] = np.arange(start, start + count)
            slots_P[row] = slot
            self._filled_B[slot] += count
            self._counters["prefill_tokens"] += count
        self._cache = self._programs.prefill(self._params, self._cache, ids_PS, positions_PS, slots_P)
        jax.block_until_ready(self._cache)
        self._counters["prefill_calls"] += 1
        self._counters["prefill_seconds"] += time.monotonic() - started

    def _decode_some(self) -> None:
        """Up to DECODE_STEPS tokens for every running request."""
        started = time.monotonic()
        count = next(n for n in self._programs.rows if n >= len(self._running))
        rows = empty_rows(count)
        row_of = {slot: slot if count == self.slots else row for row, slot in enumerate(self._running)}
        for slot, request in self._running.items():
            row, sampling = row_of[slot], request.sampling
            rows["slot_B"][row] = slot
            rows["token_B"][row] = request.tokens[-1]
            rows["position_B"][row] = len(request.tokens) - 1
            rows["left_B"][row] = sampling.max_new_tokens - len(request.logprobs)
            rows["index_B"][row] = len(request.logprobs)
            rows["seed_B2"][row] = (sampling.seed >> 32) & 0xFFFFFFFF, sampling.seed & 0xFFFFFFFF
            rows["temperature_B"][row] = sampling.temperature
            rows["top_p_B"][row] = sampling.top_p
            rows["stop_BZ"][row, : len(request.stop_ids)] = list(request.stop_ids)
        ids_SB, logprobs_SB, self._cache = self._programs.decode(self._params, self._cache, rows, DECODE_STEPS)
        self._counters["decode_steps"] += int((ids_SB >= 0).any(axis=1).sum())
        self._counters["decode_seconds"] += time.monotonic() - started
        for slot, request in list(self._running.items()):
            row = row_of[slot]
            drawn = [i for i in ids_SB[:, row].tolist() if i >= 0]
            at = len(request.tokens)
            request.tokens += drawn
            request.logprobs += logprobs_SB[: len(drawn), row].tolist()
            self._held_BT[slot, at : at + len(drawn)] = drawn
            self._known_B[slot] = at + len(drawn)
            self._filled_B[slot] = at + len(drawn) - 1
            if not request.spans or request.spans[-1][0] != self.version:
                request.spans.append([self.version, len(request.logprobs) - len(drawn), 0])
            request.spans[-1][2] = len(request.logprobs)
            self._counters["generated_tokens"] += len(drawn)
            if drawn[-1] in request.stop_ids:
                self._finish(slot, ("stop", drawn[-1]))
            elif len(request.logprobs) >= request.sampling.max_new_tokens:
                self._finish(slot, ("length", len(request.logprobs)))

    def _finish(self, slot: int, finish: tuple[str, Any]) -> None:
        request = self._running.pop(slot)
        self._clock += 1
        self._used_B[slot] = self._clock
        self._known_B[slot] = self._filled_B[slot]
        self._answer(request, finish)

    def _answer(self, request: _Request, finish: tuple[str, Any]) -> None:
        self._counters["requests"] += 1
        self._open.discard(request)
        request.future.set_result(
            Result(
                rid=request.rid,
                prompt_tokens=request.prompt_tokens,
                ids=request.tokens[request.prompt_tokens :],
                logprobs=request.logprobs,
                spans=[(version, start, end) for version, start, end in request.spans],
                finish=finish,
                cached_tokens=request.cached or 0,
                retractions=request.retractions,
                version=self.version,
                seconds=time.monotonic() - request.born,
            )
        )

    def _abort(self, rid: str | None) -> int:
        reason = ("abort", "Aborted")
        slots = [slot for slot, request in self._running.items() if rid in (None, request.rid)]
        queued = [request for request in self._waiting if rid in (None, request.rid)]
        for slot in slots:
            self._finish(slot, reason)
        for request in queued:
            self._waiting.remove(request)
            self._answer(request, reason)
        self._counters["aborts"] += len(slots) + len(queued)
        return len(slots) + len(queued)

    def _retract(self) -> None:
        for slot, request in reversed(self._running.items()):
            request.retractions += 1
            self._waiting.appendleft(request)
            self._known_B[slot] = self._filled_B[slot]
        self._running.clear()

    def _forget(self) -> bool:
        """Drop all keys and values; those of running requests will be computed again."""
        for slot in range(self.slots):
            if slot not in self._running:
                self._known_B[slot] = 0
        self._filled_B[:] = 0
        self._mixed_B[:] = False
        for request in self._running.values():
            request.retractions += 1
        return True

    def _swap(self, config, params, version: str, flush_cache: bool) -> None:
        shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (params, self._params)]
        if dataclasses.replace(config, dtype=self.config.dtype) != self.config or shapes[0] != shapes[1]:
            raise ValueError(
                "the new weights belong to another model configuration than the one that is served; restart the sampler"
            )
        started = time.monotonic()
        self._params, self.version = params, version
        if flush_cache:
            self._forget()
        else:
            for slot in range(self.slots):
                self._mixed_B[slot] = slot in self._running
                if slot not in self._running:
                    self._known_B[slot] = self._filled_B[slot] = 0
        self._counters["swaps"] += 1
        self._counters["swap_seconds"] += time.monotonic() - started
