"""The loss head: every backend against a float64 definition, the TPU kernels' races, and compilers."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import needs_compiler
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import aot
from pallas_kernels.loss_head import token_logprobs, tpu, xla
from pallas_kernels.loss_head.shapes import NORTH
from pallas_kernels.loss_head.tpu import Tiles

SMALL = Tiles(n=128, v=256, compute=128)
TPUS = [name for name, chip in aot.CHIPS.items() if chip.platform == "tpu"]
# (tokens, vocabulary, scale)
CASES = {
    "whole tiles": (256, 512, 1.0),
    "one token": (1, 512, 1.0),
    "tokens no tile divides": (150, 256, 1.0),
    "a vocabulary no tile divides": (128, 601, 1.0),
    "nothing divides, scaled": (131, 777, 0.37),
    "a vocabulary smaller than a register": (3, 5, 2.0),
}


def arrays(N: int, V: int, D: int = 128, seed: int = 0, size: float = 1.0):
    """Logits as wide as a model's: of standard deviation 3, with targets likely and unlikely."""
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(N, D)) * size, rng.normal(size=(V, D)) * 3 / np.sqrt(D)
    target = rng.integers(0, V, N)
    target[: N // 2] = (x @ w.T).argmax(-1)[: N // 2]
    if N > 1:
        target[-1] = V - 1  # the last row of all
    return x.astype(np.float32), w.astype(np.float32), target.astype(np.int32), rng.normal(size=(2, N))


def definition(x, w, target, dlogp, dlse, scale):
    """(logp, lse, entropy, dx, dw) in float64."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    s = x @ w.T * scale
    peak = s.max(-1, keepdims=True)
    lse = (np.log(np.exp(s - peak).sum(-1, keepdims=True)) + peak)[:, 0]
    p = np.exp(s - lse[:, None])
    one_hot = np.arange(len(w)) == target[:, None]
    ds = (one_hot * dlogp[:, None] + p * (dlse - dlogp)[:, None]) * scale
    return s[one_hot] - lse, lse, lse - (p * s).sum(-1), ds @ w, ds.T @ x


def run(x, w, target, dlogp, dlse, scale, backend, **how):
    """(logp, lse, entropy, dx, dw) of a backend, compiled; the entropy's own gradient must be none."""

    @jax.jit
    def both(x, w, target, dlogp, dlse):
        if backend == "tpu":
            call = functools.partial(tpu.token_logprobs, scale=scale, with_entropy=True, **how)
            values, pull = jax.vjp(lambda x, w: call(x[None], w, target[None]), x, w)
            cotangents = tuple(v[None] for v in (dlogp, dlse, dlse))
            return *(v[0] for v in values), *pull(cotangents)
        call = functools.partial(token_logprobs, scale=scale, with_entropy=True, backend=backend)
        values, pull = jax.vjp(lambda x, w: call(x, w, target), x, w)
        return *values, *pull((dlogp, dlse, dlse))

    return both(x, w, target, *(jnp.asarray(v, jnp.float32) for v in (dlogp, dlse)))


NAMES = ("logp", "lse", "entropy", "dx", "dw")


@pytest.mark.parametrize("backend", ["reference", "xla", "auto", "tpu"])
@pytest.mark.parametrize("case", CASES)
def test_backend_equals_the_definition(case, backend):
    N, V, scale = CASES[case]
    x, w, target, (dlogp, dlse) = arrays(N, V)
    how = {"tiles": SMALL, "interpret": True} if backend == "tpu" else {}
    found = run(jnp.asarray(x), jnp.asarray(w), jnp.asarray(target), dlogp, dlse, scale, backend, **how)
    for name, ours, theirs in zip(NAMES, found, definition(x, w, target, dlogp, dlse, scale), strict=True):
        assert ours.shape == theirs.shape
        error, size = np.abs(np.asarray(ours, np.float64) - theirs).max(), np.abs(theirs).max()
        assert error <= 2e-6 * max(size, 1.0 if theirs.ndim == 1 else 0.0), f"{name}: {error:.3g} of {size:.3g}"


@pytest.mark.parametrize("backend", ["xla", "tpu"])
def test_gradient_is_the_slope(backend):
    x, w, target, (dlogp, dlse) = arrays(40, 300, seed=1)
    rng = np.random.default_rng(2)
    direction = [rng.normal(size=a.shape) for a in (x, w)]

    def value(step: float) -> float:
        moved = [np.asarray(a, np.float64) + step * d for a, d in zip((x, w), direction, strict=True)]
        logp, lse = definition(*moved, target, dlogp, dlse, 0.7)[:2]
        return float((logp * dlogp + lse * dlse).sum())

    slope = (value(1e-5) - value(-1e-5)) / 2e-5
    how = {"tiles": SMALL, "interpret": True} if backend == "tpu" else {}
    found = run(jnp.asarray(x), jnp.asarray(w), jnp.asarray(target), dlogp, dlse, 0.7, backend, **how)[3:]
    ours = sum(float((np.asarray(g, np.float64) * d).sum()) for g, d in zip(found, direction, strict=True))
    assert abs(ours - slope) < 1e-5 * abs(slope)


def test_rows_are_tokens():
    """[B, S, D] gives what its tokens give in one line, and one chunk what many give."""
    x, w, target, _ = arrays(300, 64, seed=3)
    shaped = jnp.asarray(x).reshape(2, 150, -1), jnp.asarray(w), jnp.asarray(target).reshape(2, 150)
    for backend in ("xla", "auto"):
        rows = token_logprobs(*shaped, backend=backend)
        line = token_logprobs(x, w, target, backend="reference")
        for row, flat in zip(rows, line, strict=True):
            np.testing.assert_allclose(row.reshape(-1), flat, rtol=0, atol=5e-6)


def test_huge_logits_and_foreign_targets():
    """Logits of thousands overflow nothing; a target of another shard's rows picks 0 and adds to no gradient."""
    x, w, target, (dlogp, dlse) = arrays(130, 300, size=300.0)
    largest = np.abs(x @ w.T).max()
    assert largest > 2000
    found = run(*map(jnp.asarray, (x, w, target)), dlogp, dlse, 1.0, "tpu", tiles=SMALL, interpret=True)
    # The rounding of a logit, which is relative to it, is a relative error of its probability.
    for name, ours, theirs in zip(NAMES, found, definition(x, w, target, dlogp, dlse, 1.0), strict=True):
        size = np.abs(theirs).max() if theirs.ndim == 2 else 1.0
        assert np.abs(np.asarray(ours) - theirs).max() < 2e-6 * largest * size, name
    for foreign in (-5, 300, 383, 10**6):
        picked, _, _ = tpu.forward(x, w, jnp.full(130, foreign), 1.0, False, tiles=SMALL, interpret=True)
        np.testing.assert_array_equal(picked, 0.0)


def test_what_lies_beyond_the_last_rows_is_never_used():
    """Interpret mode fills the rest of a ragged tile with NaN: values and gradients stay numbers."""
    x, w, target, (dlogp, dlse) = arrays(130, 300, seed=4)
    how = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="uninitialized")
    try:
        found = run(*map(jnp.asarray, (x, w, target)), dlogp, dlse, 1.0, "tpu", tiles=SMALL, interpret=how)
        assert all(np.isfinite(np.asarray(value)).all() for value in found)
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@jax.custom_vjp
def rounded_on_the_way_back(x):
    return x


rounded_on_the_way_back.defvjp(lambda x: (x, None), lambda _, g: (g.astype(jnp.bfloat16).astype(g.dtype),))


def test_bf16_error_is_no_worse_than_xlas():
    """XLA's as on a TPU, where products round their float32 operands to bfloat16; on a CPU they do not."""
    x, w, target, (dlogp, dlse) = arrays(400, 700, D=256, seed=5)
    low = [jnp.asarray(a, jnp.bfloat16) for a in (x, w)]
    expected = definition(*(np.asarray(a, np.float64) for a in low), target, dlogp, dlse, 1.0)

    @jax.jit
    def plain(x, w):
        logits = rounded_on_the_way_back(jnp.einsum("nd,vd->nv", x, w, preferred_element_type=jnp.float32))
        lse = jax.nn.logsumexp(logits, axis=-1)
        logp = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0] - lse
        return logp, lse

    values, pull = jax.vjp(plain, *low)
    theirs = *values, None, *pull(tuple(jnp.asarray(v, jnp.float32) for v in (dlogp, dlse)))
    ours = run(*low, jnp.asarray(target), dlogp, dlse, 1.0, "tpu", tiles=SMALL, interpret=True)
    for i in (0, 1, 3, 4):
        mine, xlas = (np.sqrt(np.mean((np.asarray(v[i], np.float64) - expected[i]) ** 2)) for v in (ours, theirs))
        assert mine <= 1.02 * xlas, f"{NAMES[i]}: {mine:.3g}, XLA {xlas:.3g}"


def test_auto_is_settled_by_the_platform_it_is_lowered_for():
    x, w, target, _ = arrays(200, 384)

    def loss(x, w):
        return token_logprobs(x, w, target, backend="auto")[0].sum()

    for platform, calls in (("tpu", 3), ("cpu", 0)):
        exported = jax.export.export(jax.jit(jax.value_and_grad(loss, (0, 1))), platforms=[platform])(x, w)
        assert exported.mlir_module().count("@tpu_custom_call(") == calls
    # Elsewhere it is XLA's program, to the bit.
    ours, theirs = (
        jax.jit(jax.value_and_grad(lambda x, w: token_logprobs(x, w, target, backend=b)[0].sum(), (0, 1)))(x, w)  # noqa: B023
        for b in ("auto", "xla")
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_no_races(mode, capfd):
    assert not _races(mode, capfd)


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_a_sum_that_two_cores_share_is_seen(mode, capfd, monkeypatch):
    """v5p splits dimensions that are called parallel over its two cores: that of a sum is not one."""
    params, wrong = pltpu.CompilerParams, ("parallel", "parallel")
    monkeypatch.setattr(pltpu, "CompilerParams", lambda **how: params(**how | {"dimension_semantics": wrong}))
    assert _races(mode, capfd)


def _races(mode: str, capfd) -> bool:
    # Three tiles by two: two cores cannot share them without parting the steps of a sum, unless told where sums are.
    x, w, target, (dlogp, dlse) = arrays(384, 256)
    tiles = Tiles(n=128, v=128, compute=128)
    how = pltpu.InterpretParams(
        dma_execution_mode=mode, detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2
    )
    try:
        jax.block_until_ready(
            run(*map(jnp.asarray, (x, w, target)), dlogp, dlse, 1.0, "tpu", tiles=tiles, interpret=how)
        )
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    return "RACE DETECTED" in capfd.readouterr().out


def train(x, w, target, dlogp):
    """Forward and backward, with everything that training and RL ask for."""
    values, pull = jax.vjp(lambda x, w: tpu.token_logprobs(x, w, target, 1.0, True), x, w)
    return values, pull((dlogp, dlogp, dlogp))


def described(shape, dtype=jnp.bfloat16):
    rows = (1, shape.N)
    return (
        jax.ShapeDtypeStruct((*rows, shape.D), dtype),
        jax.ShapeDtypeStruct((shape.V, shape.D), dtype),
        jax.ShapeDtypeStruct(rows, jnp.int32),
        jax.ShapeDtypeStruct(rows, jnp.float32),
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", NORTH.values(), ids=NORTH.keys())
def test_lowers_for_tpu(shape, dtype):
    exported = jax.export.export(jax.jit(train), platforms=["tpu"])(*described(shape, dtype))
    assert exported.mlir_module().count("@tpu_custom_call(") == 3


@pytest.mark.parametrize("chip, shape", [*((chip, "tokens_128k") for chip in TPUS), ("v5p", "tokens_8k")])
def test_compiles_for(chip, shape):
    """Next to nothing in memory, so no logits; and 5 products of N D V."""
    needs_compiler(chip)
    size = NORTH[shape]
    compiled = aot.compile_for(chip, train, *described(size))
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * size.N < size.N * size.V / 1000
    assert compiled.cost_analysis()["flops"] == pytest.approx(5 * 2 * size.N * size.D * size.V, rel=0.01)


def test_float32_and_a_ragged_vocabulary_compile():
    needs_compiler("v5p")
    specs = described(NORTH["tokens_8k"], jnp.float32)
    ragged = specs[0], jax.ShapeDtypeStruct((250_001, specs[1].shape[1]), jnp.float32), *specs[2:]
    compiled = aot.compile_for("v5p", train, *ragged)
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


def test_an_oversized_tile_fails():
    needs_compiler("v5e")
    big = Tiles(n=4096, v=4096, compute=4096)
    with pytest.raises(Exception, match=re.compile("vmem|VMEM|RESOURCE_EXHAUSTED")):
        aot.compile_for(
            "v5e",
            lambda x, w, target, _: tpu.token_logprobs(x, w, target, 1.0, False, big),
            *described(NORTH["tokens_8k"]),
        )


def test_xla_holds_a_chunk_of_logits_and_no_more():
    """On the CPU, forward and backward, by the compiler's own account."""
    N, D, V = 16 * xla.CHUNK, 64, 4096
    specs = (
        jax.ShapeDtypeStruct((1, N, D), jnp.float32),
        jax.ShapeDtypeStruct((V, D), jnp.float32),
        jax.ShapeDtypeStruct((1, N), jnp.int32),
    )
    loss = jax.value_and_grad(lambda x, w, t: token_logprobs(x, w, t, backend="xla")[0].sum(), (0, 1))
    temporary = jax.jit(loss).lower(*specs).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 4 * N * V / 2


def test_refusals():
    x, w, target, _ = arrays(4, 6, D=64)
    with pytest.raises(ValueError, match="'cudnn' is not known; choose one of"):
        token_logprobs(x, w, target, backend="cudnn")
    with pytest.raises(ValueError, match="divides by 128, all bfloat16 or all float32, not x float32"):
        token_logprobs(x, w, target, backend="tpu")
    with pytest.raises(ValueError, match="do not fit"):
        token_logprobs(x, w.T, target, backend="xla")
    with pytest.raises(ValueError, match="targets are float32"):
        token_logprobs(x, w, target.astype(np.float32), backend="xla")
