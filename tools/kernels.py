"""Compiles kernels for chips that are not here, and prints what their compilers know of them.

    python tools/kernels.py attention [--chips v5p v6e tpu7x] [--shape full_8k_packed] [--json=FILE]
    python tools/kernels.py grouped_matmul --shape train_8k_up
    python tools/kernels.py loss_head --shape tokens_8k
    python tools/kernels.py paged_attention --shape decode_full_32k decode_window
    python tools/kernels.py grouped_matmul --rank --chips v5p
    python tools/kernels.py matrix [--chips v5e h200] [--shape full_128k train_8k_up] [--json=FILE]

Needs no accelerator: pip install 'north_jax[aot]'. Shapes are those of pallas_kernels/OP/shapes.py. Of each of our
kernels: exact FLOPs, bytes that must move once, bytes with what its blocks read again, and the roofline's time from the
chip's data sheet. On a TPU: VMEM, and per loop body its bundles, the cycles that the compiler plans for them (it turns
empty bundles into delays), the share of the matrix units' slots they use, and its spill stores; where the passes over
each body are known, the bundles of the whole kernel, which the cores of a v5p share. Attention has two bodies a kernel,
for blocks that are seen whole and blocks under a mask, and comes also as jax ships it (splash attention, blocks of
1024); so has paged attention, whose figures are of full tables. On Hopper, where the loss head, paged attention and
rotary positions have no kernel: registers, spilled bytes and shared memory. `--rank` compiles some choices of tiles for
TPUs and keeps the best in pallas_kernels/OP/tuned/CHIP.json: the fewest bundles over the shapes given and, of those
within 2 %, the fewest bytes fetched. `matrix` only compiles, forward and backward, and says what does.

Every figure is a count or a static bound from the compiler's own schedule; none was measured.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pallas_kernels import aot, programs, schedule  # noqa: E402
from pallas_kernels.programs import PROGRAMS, SHAPES, WORK  # noqa: E402

TPUS = [name for name, chip in aot.CHIPS.items() if chip.platform == "tpu"]
# What `matrix` compiles where.
MATRIX = {
    "attention": (
        ["full_4k", "full_8k_packed", "full_32k", "full_128k", "window_32k", "window_128k"],
        list(aot.CHIPS),
    ),
    "grouped_matmul": (
        ["train_8k_up", "train_8k_down", "train_4k_up", "train_32k_up", "train_128k_up"],
        list(aot.CHIPS),
    ),
    "loss_head": (["tokens_8k", "tokens_32k", "tokens_128k"], TPUS),
    "paged_attention": (["decode_full_32k", "decode_full_128k", "decode_window", "prefill_window"], TPUS),
    "rotary": (["queries_4k", "queries_32k", "queries_128k", "keys_128k"], TPUS),
}


def versions() -> dict[str, str]:
    """The compilers' packages, of those that are installed."""
    found = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def compile_here(op: str, whose: str, chip: str, shape: str, tiles) -> dict:
    """Compiles in this process; {} where there is nothing to compile."""
    made = PROGRAMS[op][whose](SHAPES[op][shape], aot.CHIPS[chip].platform, tiles)
    if made is None:
        return {}
    started = time.perf_counter()
    compiled = aot.compile_for(chip, made[0], *made[1])
    seconds = time.perf_counter() - started
    shared = schedule.shared_memory(made[0], *made[1]) if aot.CHIPS[chip].platform == "cuda" else {}
    return {"seconds": seconds, "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes, "shared": shared}


def in_a_process(op: str, whose: str, chip: str, shape: str, tiles, dump: pathlib.Path | None) -> tuple:
    """(what `compile_here` gives in a process of its own, None where it failed, and what the process printed).

    The compilers read where to dump their listings when they are loaded.
    """
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    if dump is not None:
        env["LIBTPU_INIT_ARGS"] = schedule.DUMP.format(folder=dump)
    command = [sys.executable, __file__, op, "--child", whose, "--chips", chip, "--shape", shape]
    if tiles is not None:
        command += ["--tiles", json.dumps(dataclasses.asdict(tiles))]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    printed = done.stdout + done.stderr
    return (None if done.returncode else json.loads(done.stdout.strip().splitlines()[-1])), printed


def inspect(op: str, whose: str, chip: str, shape: str, tiles) -> dict | None:
    """What the compilers' listings say of a program, by kernel. None where there is nothing to compile.

    Errors: RuntimeError where it does not compile.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = pathlib.Path(folder)
        summary, printed = in_a_process(op, whose, chip, shape, tiles, dump)
        if summary is None:
            raise RuntimeError(f"{op} of {shape} does not compile for {chip}: {printed.strip().splitlines()[-1]}")
        if not summary:
            return None
        bodies, vmem = schedule.bodies(dump), schedule.vmem(dump)
    shared = summary.pop("shared")
    registers = schedule.registers(printed)
    works = WORK[op](SHAPES[op][shape], aot.CHIPS[chip].platform, tiles) if whose.startswith("ours") else {}
    kernels = {}
    own = [kernel for kernel in vmem if any(known in kernel for known in works)]  # some without products
    for compiled in dict.fromkeys([*(body.kernel for body in bodies), *own, *(r.kernel for r in registers)]):
        name = next((known for known in (*works, *shared) if known in compiled), compiled)
        own = [body for body in bodies if body.kernel == compiled]
        found = {"bodies": [dataclasses.asdict(body) for body in own]}
        if name in works:
            found |= counted(works[name], chip) | {"work": dataclasses.asdict(works[name])}
            if total := schedule.static_bound(own, works[name].passes):
                found |= dict(zip(("bundles", "mxu"), total, strict=True))
        found |= {"vmem": vmem[compiled]} if compiled in vmem else {}
        found |= {"shared_memory": shared[name]} if name in shared else {}
        found |= next(({"registers": r.registers, "spilled": r.spilled} for r in registers if r.kernel == compiled), {})
        kernels[name] = found
    return {**summary, "kernels": kernels}


def counted(work, chip: str) -> dict:
    """The roofline of some work: seconds that a chip's data sheet allows no less than, and which limit sets them."""
    described = aot.CHIPS[chip]
    times = {"FLOPs": work.flops / described.flops, "bytes": work.bytes / described.bandwidth}
    limit = max(times, key=times.get)
    return {"roofline_seconds": times[limit], "roofline_of": limit}


def show(chip: str, whose: str, summary: dict) -> None:
    """Prints one program's kernels."""
    megabytes = summary["temporary_bytes"] / 2**20
    print(f"\n{chip}, {whose}: compiled in {summary['seconds']:.0f} s, {megabytes:,.0f} MiB of temporaries")
    fast = aot.CHIPS[chip].fast_memory
    for name, kernel in summary["kernels"].items():
        line = f"  {name}:"
        if work := kernel.get("work"):
            line += f" {work['flops'] / 1e9:,.0f} GFLOP, {work['bytes'] / 1e6:,.0f} MB once, "
            line += f"{work['fetched'] / 1e6:,.0f} MB by its blocks,"
            line += f" roofline {kernel['roofline_seconds'] * 1e3:.3g} ms ({kernel['roofline_of']});"
        if "vmem" in kernel:
            line += f" {kernel['vmem'] / 2**20:.1f} of {fast / 2**20:.0f} MiB VMEM"
        if "registers" in kernel:
            line += f" {kernel['registers']} registers, {kernel['spilled']} bytes spilled"
        if "shared_memory" in kernel:
            line += f", {kernel['shared_memory'] / 1024:.0f} of {fast / 1024:.0f} KiB shared memory"
        print(line)
        for n, body in enumerate(kernel["bodies"]):
            passes = f"{work['passes'][n]:10,d} times" if work and "bundles" in kernel else ""
            share = f"{body['mxu']:6.0%} of MXU slots"
            size = f"{body['bundles']:8,d} bundles{body['cycles']:8,d} cycles"
            print(f"    {size}{share}{body['spills']:8,d} spill stores{passes}")
        if "bundles" in kernel:
            print(f"    static bound: {kernel['bundles'] / 1e6:,.1f} M bundles, {kernel['mxu']:.0%} of MXU slots")


def matrix(chips: list[str], only: list[str] | None) -> dict:
    """Compiles MATRIX, or `only` some shapes of it, for some chips, and prints a row each.

    A cell's `error` says why one does not compile.
    """
    cells = []
    rows = [(op, whose) for op in MATRIX for whose in PROGRAMS[op] if whose.startswith("ours")]
    for op, whose in rows:
        shapes = [shape for shape in MATRIX[op][0] if only is None or shape in only]
        targets = [chip for chip in MATRIX[op][1] if chip in chips]
        if shapes and targets:
            print(f"\n{op + whose[4:]:24s}" + "".join(f"{chip:>14s}" for chip in targets))
        for shape in shapes:
            print(f"{shape:24s}", end="", flush=True)
            for chip in targets:
                summary, printed = in_a_process(op, whose, chip, shape, programs.tiles(op, chip), None)
                cell = {"op": op, "whose": whose, "shape": shape, "chip": chip}
                cell |= summary or {"error": printed[-500:]}
                if summary and (registers := schedule.registers(printed)):
                    cell["registers"] = {r.kernel: r.registers for r in registers}
                    cell["spilled"] = sum(r.spilled for r in registers)
                cells.append(cell)
                spills = f" {cell['spilled']} B" if "spilled" in cell else ""
                text = f"{cell['temporary_bytes'] / 2**20:,.0f} MiB{spills}" if summary else "fails"
                print(f"{text:>14s}", end="", flush=True)
            print()
    return {"versions": versions(), "cells": cells}


def bundles_of(op: str, chip: str, shapes: list[str], tiles) -> dict:
    """The static bound of some tiles: bundles of a core, by shape and kernel, and the bytes that the kernels fetch."""
    cores = aot.CHIPS[chip].cores
    bundles, fetched = {}, 0
    for shape in shapes:
        kernels = inspect(op, "ours", chip, shape, tiles)["kernels"]
        # The cores share blocks of columns; attention has blocks of queries enough for any.
        share = cores if op == "attention" else min(cores, tiles.blocks)
        bundles[shape] = {name: kernel["bundles"] // share for name, kernel in kernels.items()}
        fetched += sum(kernel["work"]["fetched"] for kernel in kernels.values())
    return {"bundles": bundles, "total": sum(sum(of.values()) for of in bundles.values()), "fetched": fetched}


def best(ranked: list[dict]) -> dict:
    """Of what compiled, the fewest bundles; of those within 2 % of them, the fewest bytes fetched, then the first."""
    compiled = [one for one in ranked if "error" not in one]
    least = min(one["total"] for one in compiled)
    return min((one for one in compiled if one["total"] <= 1.02 * least), key=lambda one: one["fetched"])


def write_ranking(op: str, chip: str, shapes: list[str]) -> None:
    """Compiles the candidates of an operation for a TPU, prints them, and writes the table of that chip."""
    ranked = []
    for tiles in programs.candidates(op, chip):
        try:
            found = bundles_of(op, chip, shapes, tiles)
        except RuntimeError as error:
            found = {"error": str(error)}
        ranked.append({"tiles": dataclasses.asdict(tiles), **found})
        print(chip, ranked[-1], flush=True)
    table = {
        "chip": chip,
        "tiles": best(ranked)["tiles"],
        "how": "the fewest bundles in the compiler's schedule and, within 2 %, the fewest bytes fetched; not measured",
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "shapes": shapes,
        "ranked": ranked,
    }
    folder = ROOT / "pallas_kernels" / op / "tuned"
    folder.mkdir(exist_ok=True)
    (folder / f"{chip}.json").write_text(json.dumps(table, indent=1) + "\n")


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=[*sorted(PROGRAMS), "matrix"])
    parser.add_argument("--chips", nargs="+", choices=sorted(aot.CHIPS), help="default: v5p v6e tpu7x; matrix: all")
    parser.add_argument("--shape", nargs="+", help="default: the first of the op; matrix: all")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there too")
    parser.add_argument("--rank", action="store_true", help="choose tiles; --chips of TPUs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--tiles", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.op == "matrix":
        print(f"Temporaries of what compiles, and bytes that GPU registers spill; {versions()}")
        found = matrix(arguments.chips or list(aot.CHIPS), arguments.shape)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        if failed := [cell for cell in found["cells"] if "error" in cell]:
            raise SystemExit(f"{len(failed)} of {len(found['cells'])} do not compile; see --json")
        return
    shapes = SHAPES[arguments.op]
    chosen = arguments.shape or [next(iter(shapes))]
    if unknown := set(chosen) - shapes.keys():
        parser.error(f"--shape {', '.join(sorted(unknown))} is not known; choose one of {', '.join(shapes)}")
    chips = arguments.chips or ["v5p", "v6e", "tpu7x"]
    if arguments.child:
        tiles = arguments.tiles and programs.TILES[arguments.op](**json.loads(arguments.tiles))
        print(json.dumps(compile_here(arguments.op, arguments.child, chips[0], chosen[0], tiles)))
        return
    if arguments.rank:
        if arguments.op not in programs.TILES:
            parser.error(f"--rank: {arguments.op} has no choice of tiles; choose {' or '.join(programs.TILES)}")
        for chip in chips:
            write_ranking(arguments.op, chip, chosen)
        return
    print("Forward and, but for paged attention, backward, bfloat16.")
    print("Counts, and static bounds from the compilers' schedules; none was measured.")
    figures = []
    for shape in chosen:
        print(f"\n{arguments.op}, {shape}: {shapes[shape]}")
        for chip in chips:
            for whose in PROGRAMS[arguments.op]:
                summary = inspect(arguments.op, whose, chip, shape, programs.tiles(arguments.op, chip))
                if summary is not None:
                    figures.append({"op": arguments.op, "shape": shape, "chip": chip, "whose": whose, **summary})
                    show(chip, whose, summary)
                elif whose.startswith("ours"):
                    print(f"\n{chip}, {whose}: {arguments.op} has no kernel for it")
    if arguments.json:
        arguments.json.write_text(json.dumps({"versions": versions(), "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
