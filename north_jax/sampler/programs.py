"""The engine's device programs: prefill, copy and decode, each compiled ahead of time for a few fixed shapes."""

import collections
import concurrent.futures
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from north_jax.model.cache import Cache
from north_jax.sampler.sampling import MAX_STOP_IDS, sample, token_uniforms

# (prompts, new tokens of each) one prefill call may take: a lone observation, a wave of them, a wave of first prompts.
PREFILL_SHAPES = ((2, 32), (8, 32), (8, 128))
# Decode steps between two looks at the queue. More steps cost fewer host round trips but leave finished slots idle.
DECODE_STEPS = 4
COPY_ROWS = 8
# Attending to fewer entries than this is not worth a program of its own.
MIN_LENGTH = 64

Rows = dict[str, np.ndarray]


def _prefill(graph, length: int, params, cache: Cache, ids_PS, positions_PS, slots_P) -> Cache:
    """Write the keys and values of P prompts' next S tokens; tokens at positions below 0 are padding."""
    return nnx.merge(graph, params).step(ids_PS, positions_PS, cache, length=length, slots_B=slots_P)[1]


def _copy(cache: Cache, from_P, to_P) -> Cache:
    """Copy slots `from_P` into slots `to_P`; targets beyond the slots are dropped."""
    return jax.tree.map(lambda x: x.at[to_P].set(x[from_P], mode="drop"), cache)


def _decode(graph, length: int, params, cache: Cache, rows: dict[str, jax.Array], steps):
    """Up to `steps` tokens for every row: (ids_SB, logprobs_SB, cache); ids are -1 where nothing was drawn."""
    model = nnx.merge(graph, params)
    shape = (DECODE_STEPS, rows["token_B"].shape[0])

    def more(carry):
        step, _, position_B, *_ = carry
        return (step < steps) & jnp.any(position_B >= 0)

    def one(carry):
        step, token_B, position_B, cache, ids_SB, logprobs_SB = carry
        active_B = position_B >= 0
        x_BSD, cache = model.step(
            token_B[:, None], position_B[:, None], cache, length=length, slots_B=rows.get("slot_B")
        )
        uniform_B = token_uniforms(rows["seed_B2"], rows["index_B"] + step)
        drawn_B, logprob_B = sample(model.logits(x_BSD)[:, 0], uniform_B, rows["temperature_B"], rows["top_p_B"])
        ids_SB = ids_SB.at[step].set(jnp.where(active_B, drawn_B, -1))
        logprobs_SB = logprobs_SB.at[step].set(jnp.where(active_B, logprob_B, 0.0))
        stopped_B = jnp.any(drawn_B[:, None] == rows["stop_BZ"], axis=-1) | (step + 1 >= rows["left_B"])
        position_B = jnp.where(active_B & ~stopped_B, position_B + 1, -1)
        return step + 1, drawn_B, position_B, cache, ids_SB, logprobs_SB

    start = (jnp.int32(0), rows["token_B"], rows["position_B"], cache)
    start += (jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32))
    _, _, _, cache, ids_SB, logprobs_SB = jax.lax.while_loop(more, one, start)
    return ids_SB, logprobs_SB, cache


def empty_rows(count: int) -> Rows:
    """What `Programs.decode` wants to know of each row; these draw nothing.

    The slot; the last token and its position (its key and value are not in the cache yet; -1 = idle row); how many
    tokens may still be drawn; the next token's index in the completion; the seed as two words; the sampling
    parameters; the stop ids (-1 = none).
    """
    return {
        "slot_B": np.zeros(count, np.int32),
        "token_B": np.zeros(count, np.int32),
        "position_B": np.full(count, -1, np.int32),
        "left_B": np.zeros(count, np.int32),
        "index_B": np.zeros(count, np.int32),
        "seed_B2": np.zeros((count, 2), np.uint32),
        "temperature_B": np.ones(count, np.float32),
        "top_p_B": np.ones(count, np.float32),
        "stop_BZ": np.full((count, MAX_STOP_IDS), -1, np.int32),
    }


class Programs:
    """Every program an engine of `slots` slots of `context` tokens runs, compiled before the first request.

    Nothing compiles later: a shape that was forgotten is an error, not a silent stall of seconds.
    """

    def __init__(self, graph: nnx.GraphDef, params: Any, cache: Cache):
        slots, context = cache.slots, cache.length
        # Decoding all slots is where the time goes, so it attends to no more entries than it must; every other
        # program attends to the whole context. Each length is one more program to compile.
        lengths = {-(-context * i // 4) for i in (1, 2)}
        self.lengths = (*sorted(length for length in lengths if length >= MIN_LENGTH), context)
        # A quarter of the slots has its own decode program, for the tail of a wave.
        self.rows = (max(1, slots // 4), slots) if slots > 1 else (slots,)
        widest = max(context, PREFILL_SHAPES[0][1])
        self.prefill_shapes = tuple(shape for shape in PREFILL_SHAPES if shape[1] <= widest)
        jobs: dict[tuple, tuple] = {}
        for length in self.lengths:
            rows = empty_rows(slots)
            del rows["slot_B"]  # every slot is there, in its own row
            jobs["decode", slots, length] = (_decode, (params, cache, rows, np.int32(1)))
        if len(self.rows) > 1:
            jobs["decode", self.rows[0], context] = (_decode, (params, cache, empty_rows(self.rows[0]), np.int32(1)))
        for P, S in self.prefill_shapes:
            ids_PS, slots_P = np.zeros((P, S), np.int32), np.zeros(P, np.int32)
            jobs["prefill", P, S, context] = (_prefill, (params, cache, ids_PS, ids_PS, slots_P))
        slots_P = np.zeros(COPY_ROWS, np.int32)
        jobs["copy",] = (_copy, (cache, slots_P, slots_P))

        def build(key: tuple) -> Callable:
            function, arguments = jobs[key]
            if function is _copy:
                return jax.jit(_copy, donate_argnums=0).lower(*arguments).compile()
            bound = functools.partial(function, graph, key[-1])
            return jax.jit(bound, donate_argnums=1).lower(*arguments).compile()

        # The compiler releases the interpreter lock.
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            self._programs = dict(zip(jobs, pool.map(build, jobs), strict=True))
        _watch_compilations()

    def prefill(self, params, cache: Cache, ids_PS, positions_PS, slots_P) -> Cache:
        """The cache with the keys and values of P prompts' next S tokens; (P, S) is one of `prefill_shapes`."""
        program = self._programs["prefill", *ids_PS.shape, cache.length]
        return program(params, cache, ids_PS, positions_PS, slots_P)

    def copy(self, cache: Cache, pairs: list[tuple[int, int]]) -> Cache:
        """The cache with the first slot of each pair copied over the second."""
        for start in range(0, len(pairs), COPY_ROWS):
            padding = [(0, cache.slots)] * (COPY_ROWS - len(pairs[start : start + COPY_ROWS]))
            from_P, to_P = np.array(pairs[start : start + COPY_ROWS] + padding, np.int32).T.copy()
            cache = self._programs["copy",](cache, from_P, to_P)
        return cache

    def decode(self, params, cache: Cache, rows: Rows, steps: int) -> tuple[np.ndarray, np.ndarray, Cache]:
        """(ids_SB, logprobs_SB, cache) of up to `steps` tokens per row; ids are -1 where nothing was drawn.

        A row ends at a stop id (which is drawn and reported) or when it has drawn all it may.
        """
        count, length = len(rows["token_B"]), cache.length
        if count == cache.slots:
            rows = {name: value for name, value in rows.items() if name != "slot_B"}
            longest = int(np.max(rows["position_B"] + np.minimum(rows["left_B"], steps)))
            length = next(length for length in self.lengths if length >= longest)
        ids_SB, logprobs_SB, cache = self._programs["decode", count, length](params, cache, rows, np.int32(steps))
        return np.asarray(ids_SB), np.asarray(logprobs_SB), cache

    @property
    def compilations(self) -> int:
        """Programs compiled, plus whatever the calling thread has compiled since (it should be nothing)."""
        return len(self._programs) + _compiled_on_thread[threading.get_ident()]


_compiled_on_thread: collections.Counter[int] = collections.Counter()


@functools.cache
def _watch_compilations() -> None:
    def listen(event: str, seconds: float, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            _compiled_on_thread[threading.get_ident()] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
