"""The embedded sampler: continuous batching over a paged cache, with the trainer's own decoder."""

import collections
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from north_jax.model.cache import Cache, Tables, init_cache
from north_jax.model.decoder import Decoder
from north_jax.parallel import spec
from north_jax.sampler.pages import Held, Pages
from north_jax.sampler.programs import (
    DECODE_STEPS,
    LONG_CONTEXT,
    LONG_PREFILL,
    PREFILL_SHAPES,
    Programs,
    empty_rows,
    window_pages,
)
from north_jax.sampler.sampling import MAX_STOP_IDS, Sampling

PAUSE_MODES = ("abort", "retract", "in_place")
PAGE_SIZE = 16  # tokens; a prefix is shared in whole pages
KV_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn)
# Prefill calls in a row while others wait for their next token.
PREFILL_BURST = 4
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

    `finish` is ("stop", token id), ("length", number of tokens) or ("abort", message), and None while it is drawn.
    `retractions` counts how often its keys and values were thrown away to be computed again. `experts` [tokens - 1,
    layers, chosen] int32 are the routed ones of all but the last token, dense layers zero; None unless the engine keeps
    them.
    """

    rid: str
    prompt_tokens: int
    ids: list[int]
    logprobs: list[float]
    spans: list[tuple[str, int, int]]
    finish: tuple[str, Any] | None
    cached_tokens: int
    retractions: int
    version: str
    seconds: float
    experts: np.ndarray | None = None


@dataclasses.dataclass(eq=False)
class _Request:
    rid: str
    tokens: list[int]  # the prompt, then the completion
    prompt_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    future: concurrent.futures.Future
    listener: Callable[["Result"], None] | None
    born: float
    logprobs: list[float] = dataclasses.field(default_factory=list)
    spans: list[list] = dataclasses.field(default_factory=list)
    cached: int | None = None
    retractions: int = 0
    held: Held = dataclasses.field(default_factory=Held)
    filled: int = 0  # how many of the tokens have their keys and values in the pages
    experts: np.ndarray | None = None  # of the filled tokens


def _parameters(model: Decoder) -> dict[str, Any]:
    # A plain dict: every call of a program takes it apart, a State ten times as slowly.
    return nnx.to_pure_dict(nnx.state(model))


class Engine:
    """Generates for up to `slots` requests at once, each of up to `context` tokens with its completion.

    One thread owns all state and the device; every public method hands it a message and is safe from any thread.
    Keys and values lie in pages. They stay after a completion ends until their pages are wanted, and a new prompt
    starts from the longest prefix that is there under the same weights: its own earlier turn, or the prompt its group
    shares. When pages run out, the youngest request is put back in the queue.

    cache_tokens: what the pages hold in all, `slots * context` if not given. kv_dtype: of keys and values, the weights'
    if not given; float8_e4m3fn halves bfloat16's memory. experts: whether results have the routed experts. A model that
    lies on a mesh is sampled there, the keys and values split as its heads are.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        slots: int,
        context: int,
        version: str,
        eos_ids: Iterable[int] = (),
        cache_tokens: int | None = None,
        kv_dtype=None,
        experts: bool = False,
    ):
        if slots < 1 or context < 8:
            raise ValueError(f"slots={slots}, context={context}: an engine needs at least 1 slot of 8 tokens")
        if kv_dtype is not None and jnp.dtype(kv_dtype) not in map(jnp.dtype, KV_DTYPES):
            raise ValueError(f"kv_dtype={kv_dtype!r} is no type for keys and values; use float8_e4m3fn or leave it out")
        tokens = slots * context if cache_tokens is None else cache_tokens
        if tokens < context:
            raise ValueError(f"cache_tokens={tokens} holds no request of the context of {context} tokens; give as many")
        self.slots, self.context, self.version = slots, context, version
        self.config = model.config
        self.eos_ids = frozenset(eos_ids)
        self.experts = experts
        self._graph = nnx.graphdef(model)
        self._params = jax.device_put(_parameters(model))
        # A request's last page is rarely full.
        self._page_counts = tokens // PAGE_SIZE + slots, self._sliding_pages(tokens)
        self._cache = self._new_cache(kv_dtype)
        self._pages = Pages(PAGE_SIZE, *self._page_counts, self.config.window)
        self._running: list[_Request] = []  # the oldest first
        self._waiting: collections.deque[_Request] = collections.deque()
        self._open: set[_Request] = set()  # both of them, and whatever is between
        self._paused = False
        self._counters: collections.Counter[str] = collections.Counter()
        self._messages: collections.deque[tuple[Callable, concurrent.futures.Future]] = collections.deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="sampler-engine", daemon=True)

    def _sliding_pages(self, tokens: int) -> int:
        """Pages of sliding layers: what all requests can look at at once, and as many tokens as there are at most."""
        fed = LONG_PREFILL[1] if self.context >= LONG_CONTEXT else PREFILL_SHAPES[-1][1]
        return self.slots + min(tokens // PAGE_SIZE, self.slots * window_pages(self.config.window, fed, PAGE_SIZE))

    def _new_cache(self, dtype) -> Cache:
        pages, sliding_pages = self._page_counts
        cache = init_cache(self.config, pages, PAGE_SIZE, sliding_pages=sliding_pages, dtype=dtype or self.dtype)
        if self.mesh is not None:
            cache = jax.device_put(cache, NamedSharding(self.mesh, PartitionSpec(*spec(("kv_heads",)))))
        return cache

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
    def mesh(self) -> Mesh | None:
        """The mesh that the weights lie on."""
        return getattr(jax.tree.leaves(self._params)[0].sharding, "mesh", None)

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

    def submit(
        self, rid: str, ids: list[int], sampling: Sampling, listener: Callable[["Result"], None] | None = None
    ) -> concurrent.futures.Future:
        """Queue a prompt; the future resolves to a Result.

        `listener` is called on the engine's thread with the Result so far (`finish` None) whenever tokens were drawn,
        but not with the last ones: those are the future's.

        `max_new_tokens` is cut to what the context leaves. Errors: ValueError, at once, for a prompt that is empty,
        has an id outside the vocabulary or fills the context, and for more stop ids than fit.
        """
        self.check(ids, sampling)
        sampling = dataclasses.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, self.context - len(ids)))
        future: concurrent.futures.Future = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled; `abort` ends a request
        stop_ids = self._stop_ids(sampling)
        request = _Request(rid, list(ids), len(ids), sampling, stop_ids, future, listener, time.monotonic())

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
                for request in reversed(list(self._running)):
                    self._retract(request)

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
        params = _parameters(model)
        if jax.tree.structure(params) == jax.tree.structure(self._params):
            params = jax.device_put(params, jax.tree.map(lambda x: x.sharding, self._params))
        jax.block_until_ready(params)
        return self.call(lambda: self._swap(model.config, params, version, flush_cache))

    def model(self) -> concurrent.futures.Future:
        """(weight version, the model that is sampled from)."""
        return self.call(lambda: (self.version, nnx.merge(self._graph, self._params)))

    def stats(self) -> concurrent.futures.Future:
        """Counters since the start (tokens, calls, steps, seconds, programs compiled), the queue and the free pages."""

        def read() -> dict[str, Any]:
            now = {"running": len(self._running), "queue_length": len(self._waiting), "paused": self._paused}
            now |= dict(zip(("pages_free", "sliding_pages_free"), self._pages.available, strict=True))
            counters = {name: self._counters[name] for name in COUNTERS}
            return counters | {"compilations": self._programs.compilations} | now

        return self.call(read)

    # --- the engine's thread ---

    def _loop(self) -> None:
        try:
            started = time.monotonic()
            self._programs = Programs(
                self._graph, self._params, self._cache, self.slots, self.context, experts=self.experts
            )
            self._decode_some([])  # draws nothing; the first call of a program sets up its buffers
            self._counters["warm_up_seconds"] = time.monotonic() - started
            while not self._stopping:
                self._answer_messages()
                if self._paused:
                    continue
                self._admit()
                for _ in range(PREFILL_BURST):
                    if not (pending := [request for request in self._running if self._unfilled(request)]):
                        break
                    self._prefill_some(pending)
                if ready := [request for request in self._running if not self._unfilled(request)]:
                    self._decode_some(ready)
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

    def _unfilled(self, request: _Request) -> int:
        # The last token's key and value are written by the decode step that draws the next one.
        return len(request.tokens) - 1 - request.filled

    def _admit(self) -> None:
        """Starts waiting requests while there is room, each on the longest prefix that is there."""
        held_back: list[_Request] = []
        while self._waiting and len(self._running) < self.slots:
            request = self._waiting.popleft()
            shared = self._pages.shared(request.tokens)
            if self._soon_shared(request, shared):
                held_back.append(request)
                continue
            wanted = -(-(len(request.tokens) + DECODE_STEPS) // PAGE_SIZE)
            if self._running and wanted > self._pages.available[0]:
                held_back.append(request)
                break  # in turn: a shorter one must not pass it for ever
            request.held = self._pages.start(request.tokens)
            request.filled = shared
            if self.experts:
                shape = (self.context, self.config.num_hidden_layers, self.config.num_experts_per_tok)
                request.experts = np.zeros(shape, np.int16)
                for i, node in enumerate(request.held.nodes):
                    request.experts[i * PAGE_SIZE : (i + 1) * PAGE_SIZE] = node.experts
            self._running.append(request)
            if request.cached is None:
                request.cached = min(shared, request.prompt_tokens)
                self._counters["cached_tokens"] += request.cached
        self._waiting.extendleft(reversed(held_back))

    def _soon_shared(self, request: _Request, shared: int) -> bool:
        """Whether a running request, one of its group perhaps, is computing the page it would compute first."""
        end = shared + PAGE_SIZE
        return end < len(request.tokens) and any(
            other.filled < end < len(other.tokens) and other.held.shared and other.tokens[:end] == request.tokens[:end]
            for other in self._running
        )

    def _with_room(self, requests: list[_Request], count: Callable[[_Request], int]) -> list[_Request]:
        """Those of the requests that run on, with pages for `count` more tokens each.

        Where pages run out, the youngest go back to the queue; what they leave is enough for the oldest.
        """
        for request in requests:
            while request in self._running and not self._pages.reserve(request.held, request.filled + count(request)):
                self._retract(self._running[-1])
        return [request for request in requests if request in self._running]

    def _fill_tables(self, tables: Tables, row: int, held: Held) -> None:
        pages = held.pages[: tables.full_BW.shape[1]]
        tables.full_BW[row, : len(pages)] = pages
        sliding = held.sliding[held.first : held.first + tables.sliding_BW.shape[1]]
        tables.sliding_BW[row, : len(sliding)] = sliding
        tables.first_B[row] = held.first

    def _filled(self, request: _Request, count: int, experts_SLC: np.ndarray | None) -> None:
        """Notes that the next `count` tokens of a request are computed."""
        if experts_SLC is not None:
            request.experts[request.filled : request.filled + count] = experts_SLC[:count]
        request.filled += count
        for node in self._pages.computed(request.held, request.tokens, request.filled):
            if experts_SLC is not None:
                at = request.held.nodes.index(node) * PAGE_SIZE
                node.experts = request.experts[at : at + PAGE_SIZE].copy()

    def _prefill_some(self, pending: list[_Request]) -> None:
        """One prefill call, in the shape that wastes least on what is pending."""
        needs = [self._unfilled(request) for request in pending]

        def worth(shape: tuple[int, int]) -> float:
            B, S = shape
            return sum(min(need, S) for need in needs[:B]) / (B * S + 32)  # 32: what a call costs beyond its tokens

        B, S = max(self._programs.prefill_shapes, key=worth)
        started = time.monotonic()
        batch = self._with_room(pending[:B], lambda request: min(self._unfilled(request), S))
        if not batch:
            return
        ends = [request.filled + min(self._unfilled(request), S) for request in batch]
        length = self._programs.length("prefill", B, S, longest=max(ends))
        tables = self._programs.empty_tables(B, S, length)
        ids_BS, positions_BS = np.zeros((B, S), np.int32), np.full((B, S), -1, np.int32)
        for row, (request, end) in enumerate(zip(batch, ends, strict=True)):
            count = end - request.filled
            ids_BS[row, :count] = request.tokens[request.filled : end]
            positions_BS[row, :count] = np.arange(request.filled, end)
            self._fill_tables(tables, row, request.held)
        self._cache, experts = self._programs.prefill(self._params, self._cache, ids_BS, positions_BS, tables, length)
        jax.block_until_ready(self._cache)
        experts = None if experts is None else np.asarray(experts)
        for row, (request, end) in enumerate(zip(batch, ends, strict=True)):
            self._counters["prefill_tokens"] += end - request.filled
            self._filled(request, end - request.filled, None if experts is None else experts[row])
        self._counters["prefill_calls"] += 1
        self._counters["prefill_seconds"] += time.monotonic() - started

    def _decode_some(self, ready: list[_Request]) -> None:
        """Up to DECODE_STEPS tokens for every request that is ready, half as many while others wait for a row."""
        started = time.monotonic()
        most = DECODE_STEPS // 2 if self._waiting else DECODE_STEPS

        def steps(request: _Request) -> int:
            return min(most, request.sampling.max_new_tokens - len(request.logprobs))

        ready = self._with_room(ready, steps)
        count = next(n for n in self._programs.rows if n >= len(ready))
        longest = max((len(request.tokens) - 1 + steps(request) for request in ready), default=1)
        length = self._programs.length("decode", count, longest=longest)
        rows, tables = empty_rows(count), self._programs.empty_tables(count, DECODE_STEPS, length)
        for row, request in enumerate(ready):
            sampling = request.sampling
            rows["token_B"][row] = request.tokens[-1]
            rows["position_B"][row] = len(request.tokens) - 1
            rows["left_B"][row] = sampling.max_new_tokens - len(request.logprobs)
            rows["index_B"][row] = len(request.logprobs)
            rows["seed_B2"][row] = (sampling.seed >> 32) & 0xFFFFFFFF, sampling.seed & 0xFFFFFFFF
            rows["temperature_B"][row] = sampling.temperature
            rows["top_p_B"][row] = sampling.top_p
            rows["top_k_B"][row] = sampling.top_k
            rows["min_p_B"][row] = sampling.min_p
            rows["stop_BZ"][row, : len(request.stop_ids)] = list(request.stop_ids)
            self._fill_tables(tables, row, request.held)
        self._cache, *drawn = self._programs.decode(self._params, self._cache, rows, tables, length, most)
        ids_SB, logprobs_SB, experts_SBLC = (None if x is None else np.asarray(x) for x in drawn)
        self._counters["decode_steps"] += int((ids_SB >= 0).any(axis=1).sum())
        self._counters["decode_seconds"] += time.monotonic() - started
        for row, request in enumerate(ready):
            experts_SLC = None if experts_SBLC is None else experts_SBLC[:, row]
            self._draw(request, ids_SB[:, row], logprobs_SB[:, row], experts_SLC)

    def _draw(self, request: _Request, ids_S: np.ndarray, logprobs_S: np.ndarray, experts_SLC) -> None:
        """Adds the tokens that were drawn to a request, which they may end."""
        drawn = [i for i in ids_S.tolist() if i >= 0]
        request.tokens += drawn
        request.logprobs += logprobs_S[: len(drawn)].tolist()
        self._filled(request, len(drawn), experts_SLC)
        if not request.spans or request.spans[-1][0] != self.version:
            request.spans.append([self.version, len(request.logprobs) - len(drawn), 0])
        request.spans[-1][2] = len(request.logprobs)
        self._counters["generated_tokens"] += len(drawn)
        if drawn[-1] in request.stop_ids:
            self._finish(request, ("stop", drawn[-1]))
        elif len(request.logprobs) >= request.sampling.max_new_tokens:
            self._finish(request, ("length", len(request.logprobs)))
        elif request.listener is not None:
            request.listener(self._result(request, None))

    def _finish(self, request: _Request, finish: tuple[str, Any]) -> None:
        self._running.remove(request)
        self._pages.release(request.held)
        self._answer(request, finish)

    def _answer(self, request: _Request, finish: tuple[str, Any]) -> None:
        self._counters["requests"] += 1
        self._open.discard(request)
        request.future.set_result(self._result(request, finish))

    def _result(self, request: _Request, finish: tuple[str, Any] | None) -> Result:
        experts = None
        if request.experts is not None and request.filled >= len(request.tokens) - 1:
            experts = request.experts[: len(request.tokens) - 1].astype(np.int32)
        return Result(
            rid=request.rid,
            prompt_tokens=request.prompt_tokens,
            ids=request.tokens[request.prompt_tokens :],
            logprobs=list(request.logprobs),
            spans=[(version, start, end) for version, start, end in request.spans],
            finish=finish,
            cached_tokens=request.cached or 0,
            retractions=request.retractions,
            version=self.version,
            seconds=time.monotonic() - request.born,
            experts=experts,
        )

    def _abort(self, rid: str | None) -> int:
        reason = ("abort", "Aborted")
        running = [request for request in self._running if rid in (None, request.rid)]
        queued = [request for request in self._waiting if rid in (None, request.rid)]
        for request in running:
            self._finish(request, reason)
        for request in queued:
            self._waiting.remove(request)
            self._answer(request, reason)
        self._counters["aborts"] += len(running) + len(queued)
        return len(running) + len(queued)

    def _retract(self, request: _Request) -> None:
        """Puts a running request back in the queue, without its pages."""
        self._running.remove(request)
        self._pages.release(request.held)
        request.filled, request.held = 0, Held()
        request.retractions += 1
        self._waiting.appendleft(request)

    def _forget(self) -> bool:
        """Drop all keys and values; those of running requests will be computed again."""
        for request in self._running:
            self._pages.release(request.held)
            request.filled, request.held = 0, Held()
            request.retractions += 1
        self._pages.forget()
        # Weights that are not numbers leave values that would spoil a sum even at weight 0.
        self._cache = self._programs.clear(self._cache)
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
            self._pages.forget()
            for request in self._running:
                request.held.shared = False  # from here on its pages come from more than one version
        self._counters["swaps"] += 1
        self._counters["swap_seconds"] += time.monotonic() - started
