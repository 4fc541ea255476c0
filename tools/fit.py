"""Whether a training step fits a slice of TPUs or GPUs, and what it sends: by the real compilers, without the chips.

    python tools/fit.py v5p:4x4x4 --mesh fsdp=16,expert=4 --sequence 65536 --rows 64 --remat block
    python tools/fit.py v5p-128                 # the same by a name of north_jax/parallel/presets.py
    python tools/fit.py v5p-64 --search         # the meshes that send least, until one fits
    python tools/fit.py v5p-64 --max_tokens     # of one device, by a line through two compiled lengths
    python tools/fit.py matrix --json docs/fit.json    # goes on where it was stopped; delete for another program

Needs `pip install -e '.[aot]'`. Compiles the very step that `run_sft` or `run_rl` takes, of the released model, in a
process of its own, and prints, per device: parameters, optimizer state, temporaries and the total (arguments, results
that are not written over them, temporaries, program) against the memory; every kind of transfer with its mesh axes,
bytes and rounds; FLOPs by count; a bound of the step time and of MFU.
All of it is "fits per compiler", nothing is measured; the bound takes the chip's data sheet at its word and every
transfer to hide behind computation. Exit code 0: fits with a tenth of the memory to spare.
"""

import argparse
import collections
import json
import math
import os
import pathlib
import resource
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # the partitioner's warnings are read from there

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # for configs

from configs.model.north_mini_code import get_config as released
from north_jax.model import Decoder, ModelConfig, blocks
from north_jax.parallel import PRESETS, batch_sharding, make_mesh
from north_jax.parallel.collectives import collectives
from north_jax.rl.learner import make_rl_objective
from north_jax.train.flops import step_flops
from north_jax.train.loss import SFT
from north_jax.train.optimizer import make_optimizer, make_schedule
from north_jax.train.step import abstract_state, make_train_step
from pallas_kernels import aot
from tools.fit_page import in_gib, page, table
from tools.fit_search import by_cost, most_tokens, named
from tools.kernels import versions

INT, FLOAT = jnp.int32, jnp.float32
ARRAYS = {
    "sft": {"ids_BS": INT, "segment_ids_BS": INT, "positions_BS": INT, "weights_BS": FLOAT},
    "rl": {
        "ids_BS": INT, "segment_ids_BS": INT, "positions_BS": INT, "action_BS": jnp.bool_, "logp_BS": FLOAT,
        "advantage_BS": FLOAT, "denominator_BS": FLOAT,
    },
}  # fmt: skip
# Bytes/s that a device sends to its neighbours, all links together, one way, from the data sheets: Google Cloud's pages
# of the TPUs (a TPU7x chip is two devices), NVLink 4 of an H100 or H200 within a node; 400 Gbit/s between nodes.
LINKS = {"v5e": 200e9, "v5p": 600e9, "v6e": 448e9, "tpu7x": 600e9, "h100": 450e9, "h200": 450e9}
BETWEEN_NODES = 50e9
SPARE = 0.1
# Slice and mesh, by name.
MATRIX = {
    name: (preset.slice, ",".join(f"{axis}={size}" for axis, size in preset.sizes.items()))
    for name, preset in PRESETS.items()
}


def described_model(options: dict) -> tuple:
    """(config, optimizer, abstract model) of the released model under these options."""
    config = ModelConfig.from_hf(released().to_dict())
    optimizer = make_optimizer(
        make_schedule(1e-5, 100), **{k: options[k] for k in ("optimizer", "moments", "param_dtype")}
    )
    return config, optimizer, nnx.eval_shape(lambda: blocks.stack(Decoder(config, rngs=nnx.Rngs(0)), options["remat"]))


def compile_step(slice_: str, sizes: dict[str, int], job: str, sequence: int, rows: int, options: dict) -> dict:
    """The figures of one step, as JSON. Raises what the compiler raises."""
    chip = slice_.partition(":")[0]
    described = aot.CHIPS[chip]
    mesh = make_mesh(**sizes, devices=aot.slice_devices(slice_))
    config, optimizer, model = described_model(options)
    state = abstract_state(model, optimizer, mesh)
    objective = SFT if job == "sft" else make_rl_objective(5.0)
    batch = {
        name: jax.ShapeDtypeStruct((rows, sequence), dtype, sharding=batch_sharding(mesh))
        for name, dtype in ARRAYS[job].items()
    }
    step = make_train_step(objective, optimizer, mesh, accumulate=options["accumulate"])
    with jax.set_mesh(mesh):
        lowered = step.trace(state, batch).lower(lowering_platforms=(described.platform,))
    started, worked = time.monotonic(), time.process_time()
    compiled = lowered.compile()
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - worked
    memory = compiled.memory_analysis()
    sent: dict[tuple, list[int]] = collections.defaultdict(lambda: [0, 0])
    for one in collectives(compiled.as_text(), mesh, blocks.shares(config)):
        if one.bytes:
            total = sent[one.kind, one.axes]
            total[0], total[1] = total[0] + one.count, total[1] + one.count * one.bytes
    flops = step_flops(config, np.ones((rows, sequence), np.int32)) / mesh.size
    computing = flops / described.flops
    sending = sum(total / link(chip, mesh, axes) for (_, axes), (_, total) in sent.items())
    return {
        "devices": mesh.size,
        "parameters_bytes": held(state.params),
        "optimizer_bytes": held(state.opt_state),
        "temporaries_bytes": memory.temp_size_in_bytes,
        "total_bytes": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes,
        "capacity_bytes": int(described.memory),
        "collectives": [
            {"kind": kind, "axes": list(axes), "rounds": round(count), "bytes": round(total)}
            for (kind, axes), (count, total) in sorted(sent.items(), key=lambda item: -item[1][1])
        ],
        "flops": flops,
        "computing_seconds": computing,
        "sending_seconds": sending,
        "mfu_at_most": computing / max(computing, sending),
        "compile_seconds": seconds,
        "compile_cpu_seconds": cpu_seconds,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def link(chip: str, mesh: Mesh, axes: tuple[str, ...]) -> float:
    """Bytes/s between devices that differ in these axes, of which the last of a mesh is within a node of 8 GPUs."""
    outermost = min((mesh.axis_names.index(axis) for axis in axes), default=len(mesh.axis_names))
    apart = math.prod(mesh.axis_sizes[outermost:])
    return BETWEEN_NODES if aot.CHIPS[chip].platform == "cuda" and apart > 8 else LINKS[chip]


def held(tree) -> int:
    """Bytes of the arrays on a device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def figures(slice_: str, mesh: str, job: str, sequence: int, rows: int, options: dict) -> dict:
    """`compile_step` in a process of its own: its figures, or its error; and what the partitioner warned of."""
    request = json.dumps([slice_, sizes_of(mesh), job, sequence, rows, options])
    ran = subprocess.run([sys.executable, __file__, "child", "--child", request], capture_output=True, text=True)
    cell = {"slice": slice_, "mesh": mesh, "job": job, "sequence": sequence, "rows": rows} | options
    cell["warnings"] = ran.stderr.count("Involuntary full rematerialization")
    if ran.returncode:
        lines = [line for line in ran.stderr.splitlines() if "Error" in line or "RESOURCE_EXHAUSTED" in line]
        return cell | {"error": (lines or ran.stderr.splitlines() or ["no message"])[-1][:300], "fits": False}
    found = json.loads(ran.stdout.splitlines()[-1])
    return cell | found | {"fits": found["total_bytes"] <= (1 - SPARE) * found["capacity_bytes"]}


def sizes_of(mesh: str) -> dict[str, int]:
    """{"fsdp": 16, "expert": 4} of "fsdp=16,expert=4"."""
    return {axis: int(size) for axis, size in (part.split("=") for part in mesh.split(","))}


def show(cell: dict) -> None:
    """The figures of one step, in words and numbers."""
    name = f"{cell['slice']}, {cell['mesh']}: {cell['job']}, {cell['rows']} rows of {cell['sequence']:,}"
    name += f", remat {cell['remat']}, accumulate {cell['accumulate']}, {cell['param_dtype']} {cell['optimizer']}"
    if "error" in cell:
        print(f"{name}\n  does not compile: {cell['error']}")
        return
    gib = in_gib(cell)
    print(
        f"{name}\n  {'fits' if cell['fits'] else 'DOES NOT FIT'} per compiler, GiB a device: parameters"
        f" {gib['parameters']:.2f}, optimizer {gib['optimizer']:.2f}, temporaries {gib['temporaries']:.2f}; total"
        f" {gib['total']:.2f} of {gib['capacity']:.0f}"
    )
    for one in cell["collectives"]:
        axes = " x ".join(one["axes"])
        print(f"  {one['kind']:20s}{axes:22s}{one['rounds']:7,d} rounds{one['bytes'] / 2**30:10.2f} GiB sent")
    print(
        f"  {cell['flops'] / 1e12:,.0f} TFLOP a device: {cell['computing_seconds']:.2f} s at the chip's peak, transfers"
        f" {cell['sending_seconds']:.2f} s at its links'; MFU at most {cell['mfu_at_most']:.0%} (bounds, not measured)"
    )
    print(
        f"  {cell['warnings']} warnings of the partitioner; compiled in {cell['compile_seconds']:.0f} s"
        f" ({cell['compile_cpu_seconds']:.0f} of a core) with {gib['host']:.1f} GiB of host memory"
    )


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "slice",
        help="chip:topology, as v5p:4x4x4 or h200:1x8x8 (partitions x nodes x GPUs); or a preset,"
        f" {', '.join(MATRIX)}; or matrix, all of these",
    )
    parser.add_argument(
        "--mesh", help="sizes of the mesh's axes; -1: what is left; by default the preset's, or fsdp=-1"
    )
    parser.add_argument("--job", choices=sorted(ARRAYS), default="sft")
    parser.add_argument("--sequence", type=int, default=65536)
    parser.add_argument("--rows", type=int, default=64, help="of a step, all devices together")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--remat", choices=blocks.REMAT, default="block")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--moments", default="float32")
    parser.add_argument("--param_dtype", default="bfloat16")
    parser.add_argument("--search", action="store_true", help="the mesh that sends least and fits")
    parser.add_argument("--max_tokens", action="store_true", help="tokens of a step that a device has room for")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there too")
    parser.add_argument("--page", type=pathlib.Path, help="and a page of them, with bars")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        print(json.dumps(compile_step(*json.loads(arguments.child))))
        return
    options = {k: getattr(arguments, k) for k in ("accumulate", "remat", "optimizer", "moments", "param_dtype")}
    slice_, mesh = MATRIX.get(arguments.slice, (arguments.slice, "fsdp=-1"))
    mesh = arguments.mesh or mesh
    one = (slice_, mesh, arguments.job, arguments.sequence, arguments.rows, options)
    if arguments.search:
        raise SystemExit(not search(slice_, *one[2:]))
    if arguments.max_tokens:
        raise SystemExit(not max_tokens(*one))
    cells, runs = [], [one]
    if arguments.slice == "matrix":
        runs = [(*run, options) for run in matrix()]
        if arguments.json and arguments.json.exists():
            before = json.loads(arguments.json.read_text())
            cells = [c for c in before["cells"] if "error" not in c] if before["versions"] == versions() else []
            runs = [run for run in runs if not any(same(cell, run) for cell in cells)]
    for run in runs:
        cells.append(figures(*run) | {"date": time.strftime("%Y-%m-%d")})
        show(cells[-1])
        if arguments.json:
            arguments.json.write_text(json.dumps({"versions": versions(), "cells": cells}, indent=1) + "\n")
        if arguments.page:
            arguments.page.write_text(page(versions(), cells))
    if arguments.slice == "matrix":
        print(table(cells))
    raise SystemExit(not all(cell["fits"] for cell in cells))


def matrix() -> list[tuple[str, str, str, int, int]]:
    """Every preset's SFT at both lengths and RL, a row for every device that has its own."""
    jobs = ("sft", 65536), ("sft", 131072), ("rl", 65536)
    return [(slice_, mesh, job, n, rows_of(mesh)) for job, n in jobs for slice_, mesh in MATRIX.values()]


def same(cell: dict, run: tuple) -> bool:
    """Whether the cell is this run's."""
    *names, options = run
    return [cell[k] for k in ("slice", "mesh", "job", "sequence", "rows")] == names and options.items() <= cell.items()


def search(slice_: str, job: str, sequence: int, rows: int, options: dict) -> bool:
    """Compiles on the meshes that the job divides over, the one that sends least first, until one fits."""
    devices, capacity = aot.slice_devices(slice_), aot.CHIPS[slice_.partition(":")[0]].memory
    config, optimizer, model = described_model(options)
    sizes = {"dense": 0, "experts": 0}
    for _, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        sizes["experts" if "expert" in param.get_metadata("axes") else "dense"] += param.size
    meshes = by_cost(config, len(devices), sequence, rows, (sizes["dense"], sizes["experts"]))
    print(f"{len(meshes)} meshes divide {rows} rows of {sequence:,} tokens over {len(devices)} devices")
    for candidate in meshes:
        state = abstract_state(model, optimizer, make_mesh(**candidate, devices=devices))
        before = held(state.params) + held(state.opt_state)
        if before > (1 - SPARE) * capacity:
            print(f"{named(candidate)}: parameters and optimizer alone are {before / 2**30:.1f} GiB")
            continue
        cell = figures(slice_, named(candidate), job, sequence, rows, options)
        show(cell)
        if cell["fits"]:
            return True
    print("none fits; accumulate more, keep less (--remat, --moments), or take more devices")
    return False


def max_tokens(slice_: str, mesh: str, job: str, sequence: int, rows: int, options: dict) -> bool:
    """Prints how many tokens of a step a device holds, by a line through `sequence` and half of it, both compiled."""
    points = []
    for length in (sequence // 2, sequence):
        cell = figures(slice_, mesh, job, length, rows, options)
        show(cell)
        if "error" in cell:
            return False
        points.append((rows * length // cell["devices"], cell["total_bytes"]))
    most = most_tokens(points, int((1 - SPARE) * cell["capacity_bytes"]))
    print(f"max_tokens_per_device: {most:,} per compiler, by a line through {points[0][0]:,} and {points[1][0]:,}")
    return most > 0


def rows_of(mesh: str) -> int:
    """A row for every device that rows are split over."""
    return math.prod(size for axis, size in sizes_of(mesh).items() if axis in ("data", "fsdp", "expert"))


if __name__ == "__main__":
    main()
