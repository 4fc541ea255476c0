"""The engine's device programs: prefill and decode, each compiled ahead of time for a few fixed shapes."""

import collections
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from north_jax.model.cache import Cache, Tables
from north_jax.model.config import ModelConfig
from north_jax.model.decoder import Decoder
from north_jax.model.row_cache import RowCache, copy_back, copy_out
from north_jax.sampler.sampling import MAX_STOP_IDS, sample, token_uniforms

# (rows, new tokens of each) one prefill call may take: a lone observation, a wave of them, a wave of first prompts, and
# pieces of long documents where the context has room for them.
PREFILL_SHAPES = ((2, 32), (8, 32), (8, 128))
LONG_CONTEXT, LONG_PREFILL = 4096, (2, 1024)
# Decode steps between two looks at the queue, at most. More steps cost fewer host round trips but leave finished rows
# idle: the engine takes half as many while requests wait for a row.
DECODE_STEPS = 8
# Keys and values that are copied out of their pages for the steps of a call, at most; beyond, every step gathers them.
COPIED_BYTES = 2**28
# Attending to fewer tokens than this is not worth a program of its own.
MIN_LENGTH = 64

Rows = dict[str, np.ndarray]


def _experts(model: Decoder, trace: dict[str, jax.Array]) -> jax.Array:
    """The routed experts [B, S, L, C] of a traced pass; zero in dense layers."""
    config = model.config
    layers = [trace.get(f"layer{i}/router_topk_indices") for i in range(config.num_hidden_layers)]
    some = next(layer for layer in layers if layer is not None)
    return jnp.stack([jnp.zeros_like(some) if layer is None else layer for layer in layers], 2).astype(jnp.int16)


def _prefill(graph, experts: bool, backend: str, params, cache: Cache, ids_BS, positions_BS, tables: Tables):
    """(the cache with the next S tokens of every row, their experts or None)."""
    model, trace = nnx.merge(graph, params), {} if experts else None
    _, cache = model.step(ids_BS, positions_BS, cache, tables, trace, backend)
    return cache, _experts(model, trace) if experts else None


def _decode(graph, experts: bool, backend: str, params, cache: Cache, rows: Rows, tables: Tables, steps):
    """Up to `steps` tokens for every row; see `Programs.decode`."""
    config: ModelConfig = nnx.merge(graph, params).config
    sliding = tuple(config.is_sliding(i) for i in range(config.num_hidden_layers))

    def from_pages(params, cache, rows, tables, steps):
        return _draw(graph, experts, backend, params, cache, rows, tables, steps)

    def from_copies(params, cache, rows, tables, steps):
        copies = copy_out(cache, tables, sliding)
        copies, ids_SB, *drawn = _draw(graph, experts, backend, params, copies, rows, tables, steps)
        step_S1 = jnp.arange(DECODE_STEPS)[:, None]
        positions_SB = jnp.where(ids_SB >= 0, rows["position_B"] + step_S1, -1)
        return copy_back(cache, copies, tables, positions_SB.T, sliding, config.window), ids_SB, *drawn

    copied = sum(tables.sliding_BW.size if slides else tables.full_BW.size for slides in sliding)
    copied *= 2 * cache.k[0][:, 0].nbytes
    # A TPU's kernel reads pages where they lie.
    default = from_copies if copied <= COPIED_BYTES else from_pages
    return jax.lax.platform_dependent(params, cache, rows, tables, steps, tpu=from_pages, default=default)


def _draw(graph, experts: bool, backend: str, params, cache: Cache | RowCache, rows: Rows, tables: Tables, steps):
    model = nnx.merge(graph, params)
    B = rows["token_B"].shape[0]

    def more(carry):
        step, _, position_B, *_ = carry
        return (step < steps) & jnp.any(position_B >= 0)

    def one(carry):
        step, token_B, position_B, cache, ids_SB, logprobs_SB, experts_SBLC = carry
        active_B, trace = position_B >= 0, {} if experts else None
        x_BSD, cache = model.step(token_B[:, None], position_B[:, None], cache, tables, trace, backend)
        if experts:
            experts_SBLC = experts_SBLC.at[step].set(_experts(model, trace)[:, 0])
        drawn_B, logprob_B = sample(
            model.logits(x_BSD)[:, 0],
            token_uniforms(rows["seed_B2"], rows["index_B"] + step),
            rows["temperature_B"],
            rows["top_p_B"],
            rows["top_k_B"],
            rows["min_p_B"],
        )
        ids_SB = ids_SB.at[step].set(jnp.where(active_B, drawn_B, -1))
        logprobs_SB = logprobs_SB.at[step].set(jnp.where(active_B, logprob_B, 0.0))
        stopped_B = jnp.any(drawn_B[:, None] == rows["stop_BZ"], axis=-1) | (step + 1 >= rows["left_B"])
        position_B = jnp.where(active_B & ~stopped_B, position_B + 1, -1)
        return step + 1, drawn_B, position_B, cache, ids_SB, logprobs_SB, experts_SBLC

    L, C = model.config.num_hidden_layers, model.config.num_experts_per_tok
    start = (jnp.int32(0), rows["token_B"], rows["position_B"], cache)
    start += (jnp.full((DECODE_STEPS, B), -1, jnp.int32), jnp.zeros((DECODE_STEPS, B), jnp.float32))
    start += (jnp.zeros((DECODE_STEPS, B, L, C), jnp.int16) if experts else None,)
    _, _, _, cache, ids_SB, logprobs_SB, experts_SBLC = jax.lax.while_loop(more, one, start)
    return cache, ids_SB, logprobs_SB, experts_SBLC


def _clear(cache: Cache) -> Cache:
    return jax.tree.map(jnp.zeros_like, cache)


def empty_rows(count: int) -> Rows:
    """What `Programs.decode` wants to know of each row; these draw nothing.

    The last token and its position (its key and value are not in the cache yet; -1 = idle row); how many tokens may
    still be drawn; the next token's index in the completion; the seed as two words; the sampling parameters; the stop
    ids (-1 = none).
    """
    return {
        "token_B": np.zeros(count, np.int32),
        "position_B": np.full(count, -1, np.int32),
        "left_B": np.zeros(count, np.int32),
        "index_B": np.zeros(count, np.int32),
        "seed_B2": np.zeros((count, 2), np.uint32),
        "temperature_B": np.ones(count, np.float32),
        "top_p_B": np.ones(count, np.float32),
        "top_k_B": np.zeros(count, np.int32),
        "min_p_B": np.zeros(count, np.float32),
        "stop_BZ": np.full((count, MAX_STOP_IDS), -1, np.int32),
    }


def window_pages(window: int, tokens: int, page_size: int) -> int:
    """The most pages that `tokens` consecutive queries and the window before them lie in."""
    return (window + tokens - 2) // page_size + 2


class Programs:
    """Every program of an engine for `rows` sequences of up to `context` tokens, compiled before the first request.

    Nothing compiles later: a shape that was forgotten is an error, not a silent stall of seconds. experts: whether the
    programs also return the routed experts.
    """

    def __init__(self, graph: nnx.GraphDef, params: Any, cache: Cache, rows: int, context: int, experts: bool):
        self.config: ModelConfig = nnx.merge(graph, params).config
        self._page_size = cache.page_size
        # One row has its own decode program, for a lone user; a quarter of the rows too, for the tail of a wave.
        self.rows = tuple(sorted({1, max(1, rows // 4), rows}))
        self.prefill_shapes = tuple(shape for shape in PREFILL_SHAPES if shape[1] <= max(32, context))
        if context >= LONG_CONTEXT:
            self.prefill_shapes += (LONG_PREFILL,)
        # Decoding many rows is where the time goes, so it attends to no more tokens than it must; so does everything in
        # a long context. Each length is one more program to compile.
        quarters = [-(-context * i // 4) for i in (1, 2, 4)]
        lengths = tuple(length for length in quarters if length >= MIN_LENGTH or length == context)
        long = tuple(length for length in lengths if 4 * length >= LONG_CONTEXT or length == context)
        self._attended = {("decode", count): lengths if count > 1 else long for count in self.rows}
        self._attended |= {("prefill", *shape): long for shape in self.prefill_shapes}
        jobs: dict[tuple, tuple] = {}
        for (kind, count, *new), attended in self._attended.items():
            for length in attended:
                tables = self.empty_tables(count, new[0] if new else DECODE_STEPS, length)
                if kind == "decode":
                    jobs[kind, count, length] = (_decode, (empty_rows(count), tables, np.int32(1)))
                else:
                    ids_BS = np.zeros((count, *new), np.int32)
                    jobs[kind, count, *new, length] = (_prefill, (ids_BS, ids_BS, tables))

        jobs["clear",] = (_clear, ())
        cache_shardings = jax.tree.map(lambda x: x.sharding, cache)
        # On a TPU the kernel attends, which the compiler cannot split over a mesh.
        backend = "auto" if len(cache.k[0].sharding.device_set) == 1 else "reference"

        # For the layers whose devices each run their own part.
        mesh = getattr(cache.k[0].sharding, "mesh", None)

        def build(key: tuple) -> Callable:
            with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return compiled(key)

        def compiled(key: tuple) -> Callable:
            function, arguments = jobs[key]
            if function is _clear:
                return jax.jit(_clear, donate_argnums=0, out_shardings=cache_shardings).lower(cache).compile()
            bound = functools.partial(function, graph, experts, backend)
            # The cache goes round and round: it must come back laid out as it went in.
            rest = (None,) if function is _prefill else (None, None, None)
            jitted = jax.jit(bound, donate_argnums=1, out_shardings=(cache_shardings, *rest))
            return jitted.lower(params, cache, *arguments).compile()

        # The compiler releases the interpreter lock.
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            self._programs = dict(zip(jobs, pool.map(build, jobs), strict=True))
        _watch_compilations()

    def empty_tables(self, rows: int, tokens: int, length: int) -> Tables:
        """Tables for `rows` rows that are fed `tokens` tokens and end before `length`, to be filled in."""
        W = -(-length // self._page_size)
        sliding = min(W, window_pages(self.config.window, tokens, self._page_size))
        return Tables(
            full_BW=np.zeros((rows, W), np.int32),
            sliding_BW=np.zeros((rows, sliding), np.int32),
            first_B=np.zeros(rows, np.int32),
        )

    def length(self, kind: str, rows: int, *tokens: int, longest: int) -> int:
        """The least length that the program of this shape can attend to and that holds `longest` tokens."""
        return next(length for length in self._attended[kind, rows, *tokens] if length >= longest)

    def prefill(self, params, cache: Cache, ids_BS, positions_BS, tables: Tables, length: int):
        """(the cache with the keys and values of the new tokens, their routed experts [B, S, L, C] or None).

        The shape of `ids_BS` is one of `prefill_shapes`; tokens at positions below 0 are padding.
        """
        program = self._programs["prefill", *ids_BS.shape, length]
        return program(params, cache, ids_BS, positions_BS, tables)

    def decode(self, params, cache: Cache, rows: Rows, tables: Tables, length: int, steps: int):
        """(cache, ids_SB, logprobs_SB, experts or None) of up to `steps` tokens per row; ids are -1 where it ended.

        A row ends at a stop id (which is drawn and reported) or when it has drawn all it may. The experts [S, B, L, C]
        are those of the tokens that went in.
        """
        program = self._programs["decode", len(rows["token_B"]), length]
        return program(params, cache, rows, tables, np.int32(steps))

    def clear(self, cache: Cache) -> Cache:
        """The cache with zeros in all its pages."""
        return self._programs["clear",](cache)

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
