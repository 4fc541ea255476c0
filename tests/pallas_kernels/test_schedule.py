"""What is read from the compilers' own listings."""

import pathlib

import jax.numpy as jnp
import pytest

from pallas_kernels import schedule

UTILIZATION = """== CAPACTIY:
MXU, XLU, VALU, VSTORE:SPILL
    4     2     4     1
== UTILIZATION:
"""


def write(folder: pathlib.Path, kernel: str, rows: list[str], listing: list[str]) -> None:
    stem = folder / f"17-{kernel}"
    pathlib.Path(f"{stem}-70-final_hlo-static-per-bundle-utilization.txt").write_text(UTILIZATION + "\n".join(rows))
    pathlib.Path(f"{stem}-72-final_bundles.txt").write_text("\n".join(listing))


def test_bodies_are_the_runs_between_branches_that_multiply(tmp_path):
    rows = ["0 0 0 0"] * 400 + ["3 0 1 0"] * 500 + ["2 1 1 1"] * 600 + ["4 0 0 0"] * 10
    listing = [f"{hex(i)}   : > {{ nop }}" for i in range(len(rows))]
    listing[400] = "0x190 LB: > { %s1 = sadd.s32 1, %s0 }"
    listing[899] = "0x383   : > { %22 = sbr.rel (%p1) target = $region48 }"
    listing[1499] = "0x5db   : > { %23 = sbr.rel (%p2) target = $region49 }"
    write(tmp_path, "attention-like_kernel.1", rows, listing)
    assert schedule.bodies(tmp_path) == [
        schedule.Body("attention-like_kernel.1", 500, 0.75, 0),
        schedule.Body("attention-like_kernel.1", 600, 0.5, 600),
    ]


def test_registers_and_spills():
    log = """ptxas info    : Compiling entry function 'attention_forward' for 'sm_90a'
ptxas info    : Function properties for attention_forward
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 7 barriers
ptxas info    : Compiling entry function 'big' for 'sm_90a'
    16 bytes stack frame, 268 bytes spill stores, 356 bytes spill loads
ptxas info    : Used 255 registers
"""
    assert schedule.registers(log) == [
        schedule.Registers("attention_forward", 168, 0),
        schedule.Registers("big", 255, 624),
    ]


@pytest.mark.parametrize("op", ["attention", "grouped_matmul"])
def test_the_tools_programs_trace(op):
    """Every program that tools/kernels.py compiles, on a small shape."""
    import importlib.util

    import jax

    path = pathlib.Path(__file__).parents[2] / "tools" / "kernels.py"
    spec = importlib.util.spec_from_file_location("kernels_tool", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    shape = next(iter(tool.SHAPES[op].values()))
    for make in tool.PROGRAMS[op].values():
        program, arguments = make(shape, "tpu")
        values = jax.tree.leaves(jax.eval_shape(program, *arguments))
        assert values and all(value.dtype == jnp.bfloat16 for value in values)
