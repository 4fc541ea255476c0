"""What is read from the compilers' own listings."""

import functools
import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import aot, programs, schedule
from pallas_kernels.attention import gpu
from pallas_kernels.attention import work as attention_work

TUNED = pathlib.Path(programs.__file__).parent

UTILIZATION = """== CAPACTIY:
MXU, XLU, VALU, VSTORE:SPILL
    4     2     4     1
== UTILIZATION:
"""


def write(folder: pathlib.Path, kernel: str, rows: list[str], branches: dict[int, str], *, delays: bool) -> None:
    """A listing before empty bundles become delays, or after."""
    listing = [branches.get(i, "{at}   : > {{ nop }}").format(at=hex(i)) for i in range(len(rows))]
    utilization, bundles = ("70-final", "72-final_bundles") if delays else ("68-pre-delay", "65-packed-bundles-post-ra")
    stem = folder / f"17-{kernel}"
    pathlib.Path(f"{stem}-{utilization}_hlo-static-per-bundle-utilization.txt").write_text(
        UTILIZATION + "\n".join(rows)
    )
    pathlib.Path(f"{stem}-{bundles}.txt").write_text("\n".join(listing))


def test_bodies_are_the_runs_between_branches_that_multiply(tmp_path):
    label, branch = "{at} LB: > {{ %s1 = sadd.s32 1, %s0 }}", "{at}   : > {{ %22 = sbr.rel (%p1) target = $region48 }}"
    for empty in (0, 70):  # the second body has as many bundles more before they become delays
        rows = ["0 0 0 0"] * 400 + ["3 0 1 0"] * 500 + ["2 1 1 1"] * 600 + ["4 0 0 0"] * (10 + empty)
        rows[900:900] = ["0 0 0 0"] * empty
        branches = {400: label, 899: branch, 1499 + empty: branch}
        write(tmp_path, "attention-like_kernel.1", rows, branches, delays=not empty)
    assert schedule.bodies(tmp_path) == [
        schedule.Body("attention-like_kernel.1", 500, 0.75, 0, 500),
        schedule.Body("attention-like_kernel.1", 600, 0.5, 600, 670),
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


def test_bodies_add_up_where_the_passes_over_each_are_known():
    bodies = [schedule.Body("k", 500, 0.75, 0, 520), schedule.Body("k", 600, 0.5, 600, 600)]
    assert schedule.static_bound(bodies, (3, 2)) == (2700, pytest.approx((1500 * 0.75 + 1200 * 0.5) / 2700))
    assert schedule.static_bound(bodies, (3,)) is None
    assert schedule.static_bound([], ()) is None


def test_vmem_ends_where_its_last_allocation_does(tmp_path):
    lines = [
        "  #allocation0 [shape = 'u32[]', space=smem, size = 0x4, offset = 0xffffff, fixed_abs, tag = '']",
        "  #allocation2 [shape = 'bf16[2,256,128]', space=vmem, size = 0x20000, offset = 0, scoped, tag = '']",
        "      #allocation9_spill [shape = 'u32[8]', space=vmem, size = 0x1000, offset = 0x20000, scoped, tag = '']",
    ]
    (tmp_path / "17-kernel.1-66-post-bundle-packing-post-ra.txt").write_text("\n".join(lines))
    assert schedule.vmem(tmp_path) == {"kernel.1": 0x21000}


def test_shared_memory_is_that_of_the_scratch_arrays():
    q, span = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16), jax.ShapeDtypeStruct((1, 256), jnp.int32)
    # Two warpgroups' queries; two stages of keys and of values; spans, places and the log-sum-exp.
    arrays = (2 * 64 * 128 + 2 * 2 * 128 * 128) * 2 + (2 * 2 * 64 + 2 * 128 + 2 * 64) * 4
    found = schedule.shared_memory(functools.partial(gpu.forward, scale=1.0), q, q, q, span, span)
    assert found == {"attention_forward": arrays}


def test_registers_are_no_shared_memory():
    kernel = plgpu.kernel(
        lambda *refs: None,
        out_type=jax.ShapeDtypeStruct((8,), jnp.float32),
        scratch_types=(plgpu.SMEM((16,), jnp.float32), plgpu.ACC((64, 8), jnp.float32), plgpu.Barrier()),
        kernel_name="empty",
    )
    assert schedule.shared_memory(kernel) == {"empty": 64}


@pytest.mark.parametrize("op", programs.PROGRAMS)
def test_the_tools_programs_trace(op):
    shape = next(iter(programs.SHAPES[op].values()))
    for make in programs.PROGRAMS[op].values():
        program, arguments = make(shape, "tpu")
        values = jax.tree.leaves(jax.eval_shape(program, *arguments))
        # The log-probabilities of a loss head are float32.
        assert values and {value.dtype for value in values} <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}
        assert any(value.dtype == jnp.bfloat16 for value in values)


def test_what_has_no_kernel_for_a_gpu_has_no_program_and_no_work(tool):
    for op, shapes in programs.SHAPES.items():
        shape = next(iter(shapes.values()))
        made = programs.PROGRAMS[op]["ours"](shape, "cuda")
        assert (made is None) == (op in ("loss_head", "paged_attention", "rotary"))
        assert made or programs.WORK[op](shape, "cuda", None) == {}
        # `matrix` names every operation, and no chip that one has no kernel for.
        assert made or not any(aot.CHIPS[chip].platform == "cuda" for chip in tool.MATRIX[op][1])


@pytest.fixture(scope="module")
def tool():
    path = pathlib.Path(__file__).parents[2] / "tools" / "kernels.py"
    spec = importlib.util.spec_from_file_location("kernels_tool", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_the_tool_refuses_an_unknown_shape(tool, capsys):
    with pytest.raises(SystemExit):
        tool.main(["attention", "--shape", "full_4k", "full_5k"])
    assert "--shape full_5k is not known; choose one of full_4k, " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tool.main(["loss_head", "--rank"])
    assert "--rank: loss_head has no choice of tiles; choose attention or" in capsys.readouterr().err
    # What `matrix` names exists.
    assert all(set(shapes) <= tool.SHAPES[op].keys() for op, (shapes, _) in tool.MATRIX.items())


def test_rooflines_are_the_larger_of_two_times(tool):
    chip = aot.CHIPS["v6e"]
    for flops, bytes_, limit, seconds in (
        (2 * chip.flops, chip.bandwidth, "FLOPs", 2),
        (1, 3 * chip.bandwidth, "bytes", 3),
    ):
        found = tool.counted(attention_work.Work(int(flops), int(bytes_), 0), "v6e")
        assert found == {"roofline_seconds": pytest.approx(seconds), "roofline_of": limit}


def test_the_best_has_fewest_bundles_then_fewest_bytes(tool):
    ranked = [
        {"name": "many bundles", "total": 1030, "fetched": 1},
        {"name": "near", "total": 1015, "fetched": 5},
        {"name": "least, but more bytes", "total": 1000, "fetched": 9},
        {"name": "too large", "error": "vmem"},
    ]
    assert tool.best(ranked)["name"] == "near"


@pytest.mark.parametrize("path", sorted(TUNED.glob("*/tuned/*.json")), ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_tuned_table_holds_its_own_best(tool, path):
    table, op = json.loads(path.read_text()), path.parts[-3]
    assert table["chip"] == path.stem and table["versions"].keys() >= {"jax", "libtpu"} and table["date"]
    assert table["tiles"] == tool.best(table["ranked"])["tiles"]
    assert programs.tiles(op, path.stem) == programs.TILES[op](**table["tiles"])
