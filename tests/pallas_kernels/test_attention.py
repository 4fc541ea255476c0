"""Attention over spans of keys: every backend against a float64 definition, the TPU kernels' races, and compilers."""

import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import needs_compiler
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import aot
from pallas_kernels.attention import attention, spans, tpu, xla
from pallas_kernels.attention.blocks import key_bounds, query_bounds
from pallas_kernels.attention.shapes import NORTH
from pallas_kernels.attention.tpu_common import Tiles

SMALL = Tiles(q=128, k=256, compute=128)
TPUS = [name for name, chip in aot.CHIPS.items() if chip.platform == "tpu"]


def arrays(seed: int, B: int, S: int, T: int, H: int, G: int, K: int = 128):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(B, *shape)).astype(np.float32) for shape in ((S, H, K), (T, G, K), (T, G, K))]


def definition(q, k, v, start, end, dout, dlse):
    """(out, lse, dq, dk, dv) in float64."""
    q, k, v, dout, dlse = (np.asarray(x, np.float64) for x in (q, k, v, dout, dlse))
    R, T, scale = q.shape[2] // k.shape[2], k.shape[1], q.shape[3] ** -0.5
    wide = [np.repeat(x, R, axis=2) for x in (k, v)]
    seen = ((np.arange(T) >= start[:, :, None]) & (np.arange(T) < end[:, :, None]))[:, None]
    s = np.where(seen, np.einsum("bshk,bthk->bhst", q, wide[0]) * scale, -np.inf)
    some = seen.any(-1, keepdims=True)
    peak = np.where(some, s.max(-1, keepdims=True, initial=-np.inf), 0.0)
    weight = np.exp(s - peak)
    total = weight.sum(-1, keepdims=True)
    p = weight / np.where(some, total, 1.0)
    lse = np.where(some, np.log(np.where(some, total, 1.0)) + peak, -np.inf)[..., 0]
    out = np.einsum("bhst,bthk->bshk", p, wide[1])
    dp = np.einsum("bshk,bthk->bhst", dout, wide[1])
    ds = p * (dp - np.einsum("bshk,bshk->bhs", dout, out)[..., None] + np.where(some[..., 0], dlse, 0.0)[..., None])

    def grouped(x):
        return x.reshape(*x.shape[:2], -1, R, x.shape[3]).sum(3)

    dq = np.einsum("bhst,bthk->bshk", ds, wide[0]) * scale
    dk = grouped(np.einsum("bhst,bshk->bthk", ds, q)) * scale
    return out, lse, dq, dk, grouped(np.einsum("bhst,bshk->bthk", p, dout))


def run(q, k, v, start, end, dout, dlse, **how):
    """(out, lse, dq, dk, dv) of a backend."""
    interpret = how.pop("interpret", True)
    call = functools.partial(attention, **how)
    if how["backend"] == "tpu":
        call = functools.partial(tpu.attention, scale=q.shape[3] ** -0.5, tiles=SMALL, interpret=interpret)

    @jax.jit
    def both(q, k, v, dout, dlse):
        results, pull = jax.vjp(lambda q, k, v: call(q, k, v, jnp.asarray(start), jnp.asarray(end)), q, k, v)
        return *results, *pull((dout, dlse))

    return both(q, k, v, jnp.asarray(dout, q.dtype), jnp.asarray(dlse, jnp.float32))


def check(q, k, v, start, end, seed=0, tolerance=2e-6, **how):
    rng = np.random.default_rng(seed)
    dout = rng.normal(size=q.shape).astype(np.float32)
    dlse = rng.normal(size=(q.shape[0], q.shape[2], q.shape[1])).astype(np.float32)
    expected = definition(q, k, v, start, end, dout, dlse)
    found = run(*(jnp.asarray(x) for x in (q, k, v)), start, end, dout, dlse, **how)
    # ds is a difference of numbers as large as dp: rounding is relative to these, not to what is left.
    terms = np.abs(np.einsum("bshk,bthk->bhst", dout, np.repeat(v, q.shape[2] // v.shape[2], axis=2))).max(initial=0.0)
    slack = terms * np.abs(k).max() * q.shape[3] ** -0.5
    for name, ours, theirs in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        assert np.array_equal(np.isneginf(ours), np.isneginf(theirs)), name
        finite = np.isfinite(theirs)
        error = np.abs(np.asarray(ours, np.float64)[finite] - theirs[finite]).max(initial=0.0)
        size = np.abs(theirs[finite]).max(initial=0.0)
        bound = tolerance * max(size, slack if name in ("dq", "dk") else 0.0, 1.0 if name == "lse" else 0.0)
        assert error <= bound, f"{name}: {error:.3g} of {size:.3g}"


def packed(S: int, lengths: list[int], window: int | None = None):
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)[None, :S]
    return [np.asarray(x) for x in spans(S, window=window, segment_ids_BS=jnp.asarray(ids))]


# Documents and window.
CASES = {
    "one token": ([1], None),
    "a row no tile divides": ([300], None),
    "window shorter than a tile": ([400], 50),
    "window of one": ([200], 1),
    "window longer than the row": ([150], 4096),
    "documents of one token": ([1] * 257, None),
    "a row that is its own window": ([400], 400),
    "packed in a row that is its own window": ([100, 1, 250, 161], 512),
    "packed with a window": ([100, 1, 250, 162], 130),
    "a window whose blocks divide the row": ([100, 1, 250, 165], 130),
}


@pytest.mark.parametrize("backend", ["reference", "xla", "tpu"])
@pytest.mark.parametrize("case", CASES)
def test_backend_equals_the_definition(case, backend):
    lengths, window = CASES[case]
    S = sum(lengths)
    check(*arrays(0, 1, S, S, 4, 2), *packed(S, lengths, window), backend=backend, window=window)


def test_a_row_with_a_window_is_cut_into_blocks():
    """The last case above is: else it would show nothing of them."""
    lengths, window = CASES["a window whose blocks divide the row"]
    assert xla.block_length(sum(lengths), sum(lengths), window) == 129
    assert xla.block_length(513, 513, 130) is None
    assert xla.causal_parts(400, 400, 400)[1:3] == [(100, 200, 200), (200, 300, 300)]
    assert len(xla.causal_parts(513, 513, 130)) == 3 and len(xla.causal_parts(40, 40, 40)) == 1
    for S, T, window in ((400, 400, None), (400, 512, 400), (516, 516, 130)):
        assert xla.causal_parts(S, T, window) == [(0, S, T)]


@settings(max_examples=5, deadline=None, phases=[Phase.generate])  # each one compiles: shrinking would take minutes
@given(data=st.data())
def test_any_spans(data):
    """Not only causal ones: queries without keys, spans outside the keys, in any order. XLA's too."""
    S, T = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 400))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    start = rng.integers(-50, T + 50, (2, S)).astype(np.int32)
    end = (start + rng.integers(-20, T, (2, S))).astype(np.int32)
    for backend in ("tpu", "xla"):
        check(*arrays(1, 2, S, T, 2, 1), start, end, backend=backend)


def test_five_hundred_documents():
    lengths = np.random.default_rng(0).multinomial(524, np.ones(500) / 500) + 1
    start, end = packed(1024, lengths.tolist())
    assert len(np.unique(start)) == 500
    check(*arrays(2, 1, 1024, 1024, 2, 1), start, end, backend="tpu")


def test_pieces_combine():
    """Calls on pieces of the keys give the whole, value and gradient: what context parallelism needs."""
    lengths, window = CASES["packed with a window"]
    S = sum(lengths)
    start, end = packed(S, lengths, window)
    q, k, v = (jnp.asarray(x) for x in arrays(3, 1, S, S, 2, 1))
    dout = jnp.asarray(np.random.default_rng(4).normal(size=q.shape), jnp.float32)

    def whole(q, k, v):
        return tpu.attention(q, k, v, start, end, q.shape[3] ** -0.5, tiles=SMALL, interpret=True)[0]

    def in_pieces(q, k, v):
        outs, lses = [], []
        for at in (slice(0, 200), slice(200, S)):
            piece = tpu.attention(
                q, k[:, at], v[:, at], start - at.start, end - at.start, q.shape[3] ** -0.5, tiles=SMALL, interpret=True
            )
            outs.append(piece[0])
            lses.append(piece[1])
        weights = jax.nn.softmax(jnp.stack(lses), axis=0)
        return sum(out * w.transpose(0, 2, 1)[..., None] for out, w in zip(outs, weights, strict=True))

    for ours, theirs in zip(*(jax.vjp(f, q, k, v)[1](dout) for f in (in_pieces, whole)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * float(jnp.abs(theirs).max()))


def test_gradient_is_the_slope():
    q, k, v = (jnp.asarray(x) for x in arrays(5, 1, 140, 140, 2, 1))
    start, end = packed(140, [60, 80], 33)
    rng = np.random.default_rng(6)
    weight, direction = rng.normal(size=q.shape), [rng.normal(size=x.shape) for x in (q, k, v)]

    def value(step: float) -> float:
        moved = [np.asarray(x, np.float64) + step * d for x, d in zip((q, k, v), direction, strict=True)]
        return float((definition(*moved, start, end, weight, np.zeros((1, 2, 140)))[0] * weight).sum())

    slope = (value(1e-4) - value(-1e-4)) / 2e-4
    found = run(q, k, v, start, end, weight, np.zeros((1, 2, 140)), backend="tpu")[2:]
    ours = sum(float((np.asarray(g, np.float64) * d).sum()) for g, d in zip(found, direction, strict=True))
    assert abs(ours - slope) < 2e-5 * abs(slope)


@jax.custom_vjp
def rounded_on_the_way_back(x):
    return x


rounded_on_the_way_back.defvjp(lambda x: (x, None), lambda _, g: (g.astype(jnp.bfloat16).astype(g.dtype),))


def test_bf16_error_is_no_worse_than_xlas():
    """XLA's as on a TPU, where products round their float32 operands to bfloat16; on a CPU they do not."""
    lengths, window = CASES["packed with a window"]
    S = sum(lengths)
    start, end = packed(S, lengths, window)
    low = [jnp.asarray(x, jnp.bfloat16) for x in arrays(7, 1, S, S, 2, 2)]
    dout = jnp.asarray(np.random.default_rng(8).normal(size=low[0].shape), jnp.bfloat16)
    dlse = np.zeros((1, 2, S))
    expected = definition(*(np.asarray(x, np.float64) for x in low), start, end, np.asarray(dout, np.float64), dlse)
    mask = (np.arange(S) >= start[:, :, None]) & (np.arange(S) < end[:, :, None])

    def xla(q, k, v):
        scores = jnp.einsum("bshk,bthk->bhst", q, k, preferred_element_type=jnp.float32) * q.shape[3] ** -0.5
        scores = jnp.where(mask[:, None], rounded_on_the_way_back(scores), -jnp.inf)
        return jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores).astype(v.dtype), v)

    out, pull = jax.vjp(xla, *low)
    theirs = (out, None, *pull(dout))
    ours = run(*low, start, end, dout, dlse, backend="tpu")
    for i, name in ((0, "out"), (2, "dq"), (3, "dk"), (4, "dv")):
        mine, xlas = (np.sqrt(np.mean((np.asarray(x[i], np.float64) - expected[i]) ** 2)) for x in (ours, theirs))
        assert mine <= 1.02 * xlas, f"{name}: {mine:.3g}, XLA {xlas:.3g}"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_bounds_hold_all_that_is_seen_and_full_blocks_only_that(data):
    T, q, k = 96, data.draw(st.sampled_from([8, 16])), data.draw(st.sampled_from([8, 32]))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    start = rng.integers(-9, T + 9, (1, 64)).astype(np.int32)
    end = (start + rng.integers(-5, T, (1, 64))).astype(np.int32)
    seen = ((np.arange(T) >= start[..., None]) & (np.arange(T) < end[..., None]))[0]
    blocks = seen.reshape(64 // q, q, T // k, k)
    bounds = query_bounds(jnp.asarray(start), jnp.asarray(end), T, q, k)
    by_key = np.asarray(key_bounds(bounds, T // k))[0]
    for i, (first, stop, full_first, full_stop) in enumerate(np.asarray(bounds)[0]):
        for j in range(T // k):
            if blocks[i, :, j].any():
                assert first <= j < stop and by_key[j, 0] <= i < by_key[j, 1]
            if full_first <= j < full_stop or by_key[j, 2] <= i < by_key[j, 3]:
                assert blocks[i, :, j].all()


def test_no_more_blocks_than_a_window_needs():
    start, end = spans(32768, window=4096)
    bounds = np.asarray(query_bounds(start, end, 32768, 1024, 1024))[0]
    assert (bounds[:, 1] - bounds[:, 0]).max() == 5
    assert np.asarray(bounds[8:, 3] - bounds[8:, 2]).min() == 3  # seen whole, without a mask


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_no_races(mode, capfd):
    assert not _races(mode, capfd)


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_a_missing_wait_is_seen(mode, capfd, monkeypatch):
    def careless(first, end, copies, use):
        def step(j, _):
            for copy in copies(j, 0):
                copy.start()
            use(j, 0)
            for copy in copies(j, 0):
                copy.wait()

        jax.lax.fori_loop(first, end, step, None)

    monkeypatch.setattr(tpu, "walk", careless)
    assert _races(mode, capfd)


def _races(mode: str, capfd) -> bool:
    q, k, v = (jnp.asarray(x) for x in arrays(9, 1, 256, 512, 2, 1))
    start, end = np.zeros((1, 256), np.int32), np.arange(257, 513, dtype=np.int32)[None]
    how = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True, uninitialized_memory="nan")
    try:
        found = run(q, k, v, start, end, np.ones(q.shape), np.zeros((1, 2, 256)), backend="tpu", interpret=how)
        jax.block_until_ready(found)
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    return "RACE DETECTED" in capfd.readouterr().out


def described(shape, dtype=jnp.bfloat16):
    q = jax.ShapeDtypeStruct((1, shape.S, shape.H, shape.K), dtype)
    kv = jax.ShapeDtypeStruct((1, shape.S, shape.G, shape.K), dtype)
    return q, kv, kv, jax.ShapeDtypeStruct((1, shape.S), jnp.int32)


def train(shape, tiles=Tiles()):  # noqa: B008
    """Forward and backward as one function of (q, k, v, segment ids)."""

    def both(q, k, v, segment_ids):
        start, end = spans(shape.S, window=shape.window, segment_ids_BS=segment_ids)
        out, pull = jax.vjp(lambda *x: tpu.attention(*x, start, end, shape.K**-0.5, tiles=tiles)[0], q, k, v)
        return pull(out)

    return both


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", NORTH.values(), ids=NORTH.keys())
def test_lowers_for_tpu(shape, dtype):
    exported = jax.export.export(jax.jit(train(shape)), platforms=["tpu"])(*described(shape, dtype))
    assert exported.mlir_module().count("tpu_custom_call") == 3


def test_tracing_does_not_grow_with_the_row():
    def seconds(shape) -> float:
        started = time.process_time()
        jax.jit(train(shape)).trace(*described(shape))
        return time.process_time() - started

    seconds(NORTH["full_4k"])
    short, long = (min(seconds(NORTH[name]) for _ in range(3)) for name in ("full_32k", "full_128k"))
    assert long < 2 * short + 0.1


@pytest.mark.parametrize("chip", TPUS)
def test_compiles_for(chip):
    shape = NORTH["full_128k"]
    needs_compiler(chip)
    *arrays, segment_ids = described(shape)

    def from_projections(*flat):
        """Heads side by side in one row, as projections leave them: 4-dimensional arguments lie otherwise on a TPU."""
        return train(shape)(*(x.reshape(a.shape) for x, a in zip(flat[:3], arrays, strict=True)), flat[3])

    flat = [jax.ShapeDtypeStruct((1, a.shape[1], a.shape[2] * a.shape[3]), a.dtype) for a in arrays]
    compiled = aot.compile_for(chip, from_projections, *flat, segment_ids)
    # Linear in S: the forward pass's output, statistics, XLA's copies between layouts; scores would be 1024 times q.
    assert compiled.memory_analysis().temp_size_in_bytes < 5 * flat[0].size * 2


def test_an_oversized_tile_fails():
    shape = NORTH["full_8k_packed"]
    needs_compiler("v5e")
    with pytest.raises(Exception, match=re.compile("vmem|VMEM|RESOURCE_EXHAUSTED")):
        aot.compile_for("v5e", train(shape, Tiles(q=4096, k=4096, compute=2048)), *described(shape))


def test_refusals():
    q, k, v = (jnp.asarray(x) for x in arrays(0, 1, 8, 8, 2, 1, K=64))
    start, end = spans(8)
    with pytest.raises(ValueError, match="'cudnn' is not known; choose one of"):
        attention(q, k, v, start, end, backend="cudnn")
    with pytest.raises(ValueError, match="whose width divides by 128, not 64"):
        attention(q, k, v, start, end, backend="tpu")
    with pytest.raises(ValueError, match="do not fit"):
        attention(q, k[:, :, :, :32], v, start, end, backend="reference")
