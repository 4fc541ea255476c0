"""The grouped products on Hopper: their schedule, the kernels in an interpreter, their lowering and compilation."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import hopper_interpreter
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import needs_compiler
from hypothesis import strategies as st
from jax import export
from test_grouped_matmul import EXPECTED, FUNCTIONS, float64, inputs

from pallas_kernels import schedule
from pallas_kernels.grouped_matmul import gated_grouped_matmul, gpu, grouped_matmul, rule
from pallas_kernels.grouped_matmul.gpu_kernels import COLUMNS, WARPGROUPS, Tiles
from pallas_kernels.grouped_matmul.schedule import runs
from pallas_kernels.grouped_matmul.shapes import NORTH, Shape

# Widths that no tile divides, both warpgroups at work, rings that go round, two blocks of threads.
SMALL = Shape(P=76, D=72, F=136, E=5)
SMALL_TILES = Tiles(sms=2, rows=64, stages=2, sum_stages=2)
jit_runs = jax.jit(runs, static_argnums=(1, 2, 3))
CASES = {
    "ragged": [21, 0, 5, 49, 1],
    "whole tiles, rows left over": [32, 0, 16, 0, 0],
    "one row each": [1, 1, 1, 1, 1],
    "one group holds all": [0, 0, 76, 0, 0],
    "no rows at all": [0, 0, 0, 0, 0],
}


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(sizes=st.lists(st.integers(0, 150), min_size=4, max_size=4), P=st.sampled_from([1, 60, 300]))
def test_each_row_is_in_one_run_of_its_group(sizes, P):
    rows, unit = 64, 16
    group, first, count, (real,) = (np.asarray(x) for x in jit_runs(jnp.asarray(sizes, jnp.int32), P, rows, unit))
    seen = np.full(P, -1)
    for e, start, n in zip(group[:real], first[:real], count[:real], strict=True):
        assert 0 < n <= rows and np.all(seen[start : start + n] == -1) and start + n <= P
        seen[start : start + n] = e
    np.testing.assert_array_equal(seen, np.append(np.repeat(np.arange(4), sizes), np.full(P, 4))[:P])
    assert real <= len(group) and not count[real:].any()
    for e, n in enumerate(np.bincount(seen, minlength=5)):
        parts = count[:real][group[:real] == e]
        assert len(parts) == -(-n // rows) and not np.any(parts[:-1] % unit)
        assert -(-parts // unit).sum() == -(-n // unit), "a group's parts are filled up once"


def computed(sizes, P: int, tiles: Tiles) -> tuple[int, int]:
    """Rows that rows by matrices multiply, and rows that rows by rows sum over."""
    group, _, count, _ = (np.asarray(x) for x in jit_runs(jnp.asarray(sizes, jnp.int32), P, tiles.rows, tiles.unit))
    filled = -(-count // tiles.unit) * tiles.unit
    return int(filled[group < len(sizes)].sum()), int((-(-np.asarray(sizes) // tiles.sum_rows) * tiles.sum_rows).sum())


@pytest.mark.parametrize("routing", ["uniform", "skewed"])
@pytest.mark.parametrize("tokens", [8192, 65536])
def test_padding_costs_less_than_a_twentieth(tokens, routing):
    random, shape, tiles = np.random.default_rng(0), NORTH["train_8k_up"], gpu.TILES
    shares = np.full(shape.E, 1 / shape.E) if routing == "uniform" else random.dirichlet(np.ones(shape.E))
    sizes = random.multinomial(8 * tokens, shares)
    by_matrices, by_rows = computed(sizes, 8 * tokens, tiles)
    assert 1 < by_matrices / (8 * tokens) <= 1 + (tiles.unit - 1) * shape.E / (8 * tokens) < 1.05
    assert 1 < by_rows / (8 * tokens) < 1.05
    for width in (shape.D, shape.F):  # Nor are there columns beyond the matrices.
        assert width % (WARPGROUPS * COLUMNS) == 0


def by_xla(name, sizes, ct, *arrays):
    out, pull = jax.vjp(lambda *arrays: FUNCTIONS[name](*arrays, sizes, backend="xla"), *arrays)
    return out, *pull(ct)


def check(name, sizes, run, multiplied):
    """Value and gradients by `run` against float64, and what it `multiplied`."""
    ct, x, *matrices = inputs(name, SMALL, jnp.bfloat16)
    expected = EXPECTED[name](np.asarray(sizes), *float64([ct, x, *matrices]))
    xla = by_xla(name, jnp.asarray(sizes, jnp.int32), ct, x, *matrices)
    # Rows past the last group belong to none, whatever they hold.
    ct, x = (rows.at[sum(sizes) :].set(jnp.nan) for rows in (ct, x))
    multiplied.clear()
    ours = jax.block_until_ready(run(jnp.asarray(sizes, jnp.int32), ct, x, *matrices))
    for got, other, want in zip(ours, xla, expected, strict=True):
        assert got.dtype == jnp.bfloat16 and got.shape == want.shape
        error, others = (np.linalg.norm(a - want) for a in float64([got, other]))
        assert error <= 1.001 * others, (sizes, error, others)
        np.testing.assert_array_equal(float64([got])[0][want == 0], 0)
    by_matrices, by_rows = computed(sizes, SMALL.P, SMALL_TILES)
    # Steps of 64 numbers and 256 columns in one direction, 192 and 256 in the other (72 x 136, filled up).
    depth, sums = 128 * 256 + 192 * 256, 256 * 256
    assert sum(multiplied) == (by_matrices * depth + by_rows * sums) * (1 if name == "plain" else 2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_kernels_err_no_more_than_xla_in_the_interpreter(name):
    """In bfloat16, copies, barriers and late products included; the gated pair, for its time, on two of CASES."""

    @jax.jit
    def run(sizes, ct, *arrays):
        function = getattr(rule, FUNCTIONS[name].__name__)(gpu, tiles=SMALL_TILES)
        out, pull = jax.vjp(lambda *arrays: function(*arrays, sizes), *arrays)
        return out, *pull(ct)

    try:
        with hopper_interpreter.interpreted(detect_races=True) as races:
            for sizes in list(CASES.values())[: None if name == "plain" else 2]:
                check(name, sizes, run, races.multiplied)
            assert not races()
    except ImportError as error:
        pytest.skip(f"jax {jax.__version__} keeps its Mosaic GPU interpreter elsewhere: {error}")


def test_float32_is_refused():
    with pytest.raises(ValueError, match=r"operands are \['float32'\]; backend 'gpu' wants all bfloat16"):
        grouped_matmul(jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.asarray([2, 2]), backend="gpu")


def described(shape: Shape, dtype=jnp.bfloat16):
    """sizes, the gradient in the experts' result, x, gate, up, down."""
    P, D, F, E = shape.P, shape.D, shape.F, shape.E
    dims = [(P, D), (P, D), (E, D, F), (E, D, F), (E, F, D)]
    return jax.ShapeDtypeStruct((E,), jnp.int32), *(jax.ShapeDtypeStruct(d, dtype) for d in dims)


def experts_and_gradients(backend, sizes_E, d_PD, *arrays):
    def experts(x_PD, gate_EDF, up_EDF, down_EFD):
        hidden_PF = gated_grouped_matmul(x_PD, gate_EDF, up_EDF, sizes_E, backend=backend)
        return grouped_matmul(hidden_PF, down_EFD, sizes_E, backend=backend)

    out_PD, pull = jax.vjp(experts, *arrays)
    return out_PD, *pull(d_PD)


def lowered(function, arguments, platform="cuda") -> str:
    exported = export.export(
        jax.jit(function),
        platforms=[platform],
        disabled_checks=[export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")],
    )(*arguments)
    return exported.mlir_module()


def test_lowers_for_cuda_without_a_plugin():
    program = functools.partial(experts_and_gradients, "gpu")
    # Forward two, and of their gradients two in rows and three in matrices.
    assert lowered(program, described(NORTH["train_8k_up"])).count("mosaic_gpu_v2") == 7


@pytest.mark.parametrize(
    "dtype, platform, calls", [("bfloat16", "cuda", 7), ("float32", "cuda", 0), ("bfloat16", "cpu", 0)]
)
def test_auto_chooses_by_platform_and_dtype(dtype, platform, calls):
    text = lowered(functools.partial(experts_and_gradients, "auto"), described(SMALL, dtype), platform)
    assert text.count("mosaic_gpu_v2") == calls


def test_tiles_beyond_shared_memory_are_refused_when_lowered():
    sizes, _, x, gate, _, _ = described(NORTH["train_8k_up"])
    for function, tiles in ((gpu.gmm, Tiles(stages=4)), (gpu.gmm, Tiles(rows=256)), (gpu.tgmm, Tiles(sum_stages=8))):
        w_or_y = gate if function is gpu.gmm else jax.ShapeDtypeStruct((x.shape[0], gate.shape[2]), x.dtype)
        with pytest.raises(Exception, match="max_smem_bytes"):
            lowered(functools.partial(function, tiles=tiles), (x, w_or_y, sizes))


COMPILE = """
import dataclasses, functools, jax
from pallas_kernels import aot
from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul.shapes import NORTH
from test_grouped_matmul_gpu import described, experts_and_gradients
shape = NORTH["train_8k_up"]
sizes, _, x, gate, up, _ = described(shape)
aot.compile_for("h100", gpu.gmm, x, gate, sizes)
aot.compile_for("h100", functools.partial(gpu.gated, save=False), x, gate, up, sizes)
arguments = described(dataclasses.replace(shape, P=8 * shape.P))
compiled = aot.compile_for("h200", functools.partial(experts_and_gradients, "gpu"), *arguments)
print("temporaries", compiled.memory_analysis().temp_size_in_bytes / (8 * shape.P * shape.F * 2))
"""


def test_compiles_for_hopper_without_spills():
    needs_compiler("h100")
    path = os.pathsep.join([*map(str, Path(__file__).parents[:3]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    ran = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=250)
    report = ran.stdout + ran.stderr
    assert ran.returncode == 0, report[-3000:]
    kernels = schedule.registers(report)
    assert {kernel.kernel.removesuffix("_mosaic_gpu_kernel") for kernel in kernels} == {
        "grouped_gated", "grouped_gated_saving", "grouped_gated_backward",
        "grouped_rows_by_matrices", "grouped_rows_by_transposed", "grouped_rows_by_rows",
    }  # fmt: skip
    assert all(kernel.spilled == 0 for kernel in kernels), kernels
    # ptxas serialises wgmma where it cannot keep an accumulator in registers while a product is under way.
    assert "serialized" not in report and "warpgroup.wait is injected" not in report, report
    # Hidden, a, b, its gradient and theirs, [P, F] each: nothing grows with the experts.
    (temporaries,) = (float(line.split()[1]) for line in report.splitlines() if line.startswith("temporaries"))
    assert temporaries < 6.1, temporaries
