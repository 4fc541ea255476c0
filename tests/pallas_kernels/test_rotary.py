"""Rotary positions: every backend against a float64 definition, the TPU kernel's races, and compilers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import aot
from pallas_kernels.programs import rotary_program
from pallas_kernels.rotary import angles, rotate, rule, tpu
from pallas_kernels.rotary.shapes import NORTH

THETA = 50000.0
TPUS = [name for name, chip in aot.CHIPS.items() if chip.platform == "tpu"]


def arrays(B, S, H, K=128, seed=0):
    rng = np.random.default_rng(seed)
    x, dout = rng.normal(size=(2, B, S, H, K)).astype(np.float32)
    return x, dout, rng.integers(0, 500, (B, S)).astype(np.int32)


def definition(x, positions, sign=1):
    """Pairs as complex numbers, by exp(i position theta^(-2i / K)), in float64."""
    K = x.shape[-1]
    turns = positions[:, :, None, None] * THETA ** (-np.arange(0, K, 2) / K)
    turned = x.astype(np.float64).view(np.complex128) * np.exp(sign * 1j * turns)
    return turned.view(np.float64)


def run(x, dout, positions, backend, **how):
    turn = functools.partial(tpu.rotate, **how) if backend == "tpu" else None

    @jax.jit
    def both(x, dout):
        cos, sin = angles(positions, x.shape[-1], THETA, jnp.float32)
        call = functools.partial(rule.rotate, turn) if turn else functools.partial(rotate, backend=backend)
        out, pull = jax.vjp(lambda x: call(x, cos, sin), x)
        return out, *pull(dout)

    return both(x, dout)


@pytest.mark.parametrize("backend", ["reference", "auto", "tpu"])
@settings(max_examples=8, deadline=None)
@given(B=st.integers(1, 2), S=st.sampled_from([1, 7, 255, 256, 300, 513]), H=st.integers(1, 3))
def test_backend_equals_the_definition(backend, B, S, H):
    """Values, and gradients, which are the turn back; rows that no block divides and of less than one."""
    x, dout, positions = arrays(B, S, H)
    found = run(x, dout, positions, backend, **({"interpret": True} if backend == "tpu" else {}))
    for ours, theirs in zip(found, (definition(x, positions), definition(dout, positions, -1)), strict=True):
        # An angle is rounded as a float32 of up to 500 radians is.
        assert (
            np.abs(np.asarray(ours) - theirs).max() < 2e-6 * np.abs(theirs).max() + 500 * 2**-24 * np.abs(theirs).max()
        )


def test_angles_of_small_positions_are_exact():
    cos, sin = angles(jnp.arange(8)[None], 4, 100.0, jnp.float32)
    turns = np.arange(8)[:, None] * np.array([1, 1, 0.1, 0.1])
    np.testing.assert_allclose(cos[0], np.cos(turns), atol=1e-6)
    np.testing.assert_allclose(sin[0], np.sin(turns) * [-1, 1, -1, 1], atol=1e-6)


def test_bfloat16_is_rounded_once():
    x, dout, positions = arrays(1, 260, 2)
    low = jnp.asarray(x, jnp.bfloat16), jnp.asarray(dout, jnp.bfloat16)
    ours = run(*low, positions, "tpu", interpret=True)
    theirs = run(*low, positions, "reference")
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_no_races(mode, capfd):
    assert not _races(mode, capfd)


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_blocks_that_overlap_are_seen(mode, capfd, monkeypatch):
    """The third block, which the other core has, written where the first is."""
    spec = pl.BlockSpec
    monkeypatch.setattr(pl, "BlockSpec", lambda shape, index: spec(shape, lambda b, i: index(b, i % 2)))
    assert _races(mode, capfd)


def _races(mode: str, capfd) -> bool:
    how = pltpu.InterpretParams(
        dma_execution_mode=mode, detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2
    )
    try:
        x, dout, positions = arrays(1, 700, 1)
        jax.block_until_ready(run(x, dout, positions, "tpu", interpret=how))
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    return "RACE DETECTED" in capfd.readouterr().out


def test_auto_is_settled_by_the_platform_it_is_lowered_for():
    x, dout, positions = (jnp.asarray(a) for a in arrays(1, 256, 2))
    for platform, calls in (("tpu", 2), ("cpu", 0)):
        exported = jax.export.export(jax.jit(lambda *a: run(*a, "auto")), platforms=[platform])(x, dout, positions)
        assert exported.mlir_module().count("@tpu_custom_call(") == calls


@pytest.mark.parametrize("shape", NORTH.values(), ids=NORTH.keys())
def test_lowers_for_tpu(shape):
    program, arguments = rotary_program(shape, "tpu")
    exported = jax.export.export(jax.jit(program), platforms=["tpu"])(*arguments)
    assert exported.mlir_module().count("@tpu_custom_call(") == 2


@pytest.mark.parametrize("chip", TPUS)
def test_moves_the_array_once_each_way(chip):
    """Compiled for the chip: nothing is laid out anew around the kernel, forward or backward. More than VMEM holds."""
    needs_compiler(chip)
    program, arguments = rotary_program(NORTH["queries_32k"], "tpu")
    compiled = aot.compile_for(chip, program, *arguments)
    assert compiled.memory_analysis().temp_size_in_bytes < 2**22
    moved = sum(2 * x.size * x.dtype.itemsize for x in arguments[:2])
    assert compiled.cost_analysis()["bytes accessed"] < 1.2 * moved


def test_refusals():
    x, _, positions = arrays(1, 4, 1, K=64)
    cos, sin = angles(positions, 64, THETA, jnp.float32)
    with pytest.raises(ValueError, match="'gpu' is not known; choose one of"):
        rotate(x, cos, sin, backend="gpu")
    with pytest.raises(ValueError, match="takes heads whose width divides by 128, not 64; choose"):
        rotate(x, cos, sin, backend="tpu")
    with pytest.raises(ValueError, match="do not fit"):
        rotate(x, cos[:, :2], sin, backend="reference")
