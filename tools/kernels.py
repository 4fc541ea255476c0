"""Compiles kernels for chips that are not here, and prints what their compilers know of them.

    python tools/kernels.py attention [--chips v5p v6e tpu7x] [--shape full_8k_packed] [--json=FILE]
    python tools/kernels.py grouped_matmul --shape train_8k_up

Needs no accelerator: pip install 'north_jax[aot]'. Shapes are those of pallas_kernels/OP/shapes.py. Per kernel on a
TPU: each loop body's bundles (cycles, were nothing waited for), the share of the matrix units' slots it uses, and its
spill stores; attention also as jax ships it (splash attention, blocks of 1024). Our attention has two bodies a kernel:
blocks that are seen whole, and blocks under a mask. On Hopper: registers and spilled bytes. Every figure is a static
bound from the compiler's own schedule; none was measured.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from pallas_kernels import aot, attention, grouped_matmul, schedule  # noqa: E402
from pallas_kernels.attention.shapes import NORTH as ATTENTION  # noqa: E402
from pallas_kernels.grouped_matmul.shapes import NORTH as GROUPED  # noqa: E402

BF16 = jnp.bfloat16
SHAPES = {"attention": ATTENTION, "grouped_matmul": GROUPED}


def attention_program(shape, platform: str):
    """(function, its arguments): forward and backward of packed rows, our kernels."""
    q = jax.ShapeDtypeStruct((1, shape.S, shape.H, shape.K), BF16)
    kv = jax.ShapeDtypeStruct((1, shape.S, shape.G, shape.K), BF16)

    backend = "tpu" if platform == "tpu" else "gpu"

    def program(q, k, v, dout, segment_ids):
        start, end = attention.spans(shape.S, window=shape.window, segment_ids_BS=segment_ids)
        out, pull = jax.vjp(lambda *x: attention.attention(*x, start, end, backend=backend)[0], q, k, v)
        return out, pull(dout)

    return program, (q, kv, kv, q, jax.ShapeDtypeStruct((1, shape.S), jnp.int32))


def shipped_attention_program(shape, platform: str):
    """The same by jax's splash attention, in its layout; None where it has none for the platform."""
    if platform != "tpu":
        return None
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    S, R = shape.S, shape.H // shape.G
    # Its windows count the tokens before the query.
    one = masks.CausalMask((S, S)) if shape.window is None else masks.LocalMask((S, S), (shape.window - 1, 0), 0)
    blocks = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 1024)
    sizes = splash.BlockSizes(**blocks, block_kv_compute=512, block_kv_dkv_compute=512)
    q = jax.ShapeDtypeStruct((shape.G, R, S, shape.K), BF16)
    kv = jax.ShapeDtypeStruct((shape.G, S, shape.K), BF16)

    def program(q, k, v, dout, segment_ids):
        kernel = splash.make_splash_mqa_single_device(masks.MultiHeadMask([one] * R), block_sizes=sizes)
        ids = splash.SegmentIds(segment_ids, segment_ids)
        out, pull = jax.vjp(lambda *x: jax.vmap(lambda q, k, v: kernel(q, k, v, ids))(*x), q, k, v)
        return out, pull(dout)

    return program, (q, kv, kv, q, jax.ShapeDtypeStruct((S,), jnp.int32))


def grouped_matmul_program(shape, platform: str):
    """Forward and backward of one grouped product, and of the gated pair."""
    backend = "tpu" if platform == "tpu" else "gpu"
    x = jax.ShapeDtypeStruct((shape.P, shape.D), BF16)
    w = jax.ShapeDtypeStruct((shape.E, shape.D, shape.F), BF16)

    def program(x, gate, up, dout, sizes):
        plain, pull_plain = jax.vjp(lambda x, w: grouped_matmul.grouped_matmul(x, w, sizes, backend=backend), x, gate)
        gated, pull_gated = jax.vjp(
            lambda *a: grouped_matmul.gated_grouped_matmul(*a, sizes, backend=backend), x, gate, up
        )
        return plain, pull_plain(dout), gated, pull_gated(dout)

    out = jax.ShapeDtypeStruct((shape.P, shape.F), BF16)
    return program, (x, w, w, out, jax.ShapeDtypeStruct((shape.E,), jnp.int32))


PROGRAMS = {
    "attention": {"ours": attention_program, "as jax ships it": shipped_attention_program},
    "grouped_matmul": {"ours": grouped_matmul_program},
}


def compile_here(op: str, whose: str, chip: str, shape: str) -> dict:
    """Compiles in this process; {} where there is nothing to compile."""
    made = PROGRAMS[op][whose](SHAPES[op][shape], aot.CHIPS[chip].platform)
    if made is None:
        return {}
    started = time.perf_counter()
    compiled = aot.compile_for(chip, made[0], *made[1])
    memory = compiled.memory_analysis()
    return {"seconds": time.perf_counter() - started, "temporary_bytes": memory.temp_size_in_bytes}


def inspect(op: str, whose: str, chip: str, shape: str) -> dict | None:
    """What a compilation in a process of its own says, which the compilers' dumps need. None where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": schedule.DUMP.format(folder=folder),
            "MOSAIC_GPU_DUMP_PTXAS": "1",
        }
        command = [sys.executable, __file__, op, "--child", whose, "--chips", chip, "--shape", shape]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{op} of {shape} does not compile for {chip}: {done.stderr.strip().splitlines()[-1]}")
        summary = json.loads(done.stdout.strip().splitlines()[-1])
        if not summary:
            return None
        summary["bodies"] = [dataclasses.asdict(body) for body in schedule.bodies(pathlib.Path(folder))]
        summary["kernels"] = [dataclasses.asdict(k) for k in schedule.registers(done.stdout + done.stderr)]
        return summary


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=sorted(PROGRAMS))
    parser.add_argument("--chips", nargs="+", choices=sorted(aot.CHIPS), default=["v5p", "v6e", "tpu7x"])
    parser.add_argument("--shape", help="default: the first of the op")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    shapes = SHAPES[arguments.op]
    shape = arguments.shape or next(iter(shapes))
    if shape not in shapes:
        parser.error(f"--shape {shape} is not known; choose one of {', '.join(shapes)}")
    if arguments.child:
        print(json.dumps(compile_here(arguments.op, arguments.child, arguments.chips[0], shape)))
        return
    print(f"{arguments.op}, {shape}: {shapes[shape]}, forward and backward, bfloat16")
    print("Static bounds from the compilers' schedules; nothing here was measured.")
    figures = []
    for chip in arguments.chips:
        for whose in PROGRAMS[arguments.op]:
            summary = inspect(arguments.op, whose, chip, shape)
            if summary is None:
                continue
            figures.append({"op": arguments.op, "shape": shape, "chip": chip, "whose": whose, **summary})
            temporary = summary["temporary_bytes"] / 2**20
            print(f"\n{chip}, {whose}: compiled in {summary['seconds']:.0f} s, {temporary:,.0f} MiB of temporaries")
            for body in summary["bodies"]:
                share = f"{body['mxu']:6.0%} of MXU slots"
                print(f"  {body['kernel']:44s}{body['bundles']:8,d} bundles{share}{body['spills']:8,d} spill stores")
            for kernel in summary["kernels"]:
                print(f"  {kernel['kernel']:44s}{kernel['registers']:5d} registers{kernel['spilled']:6d} bytes spilled")
    if arguments.json:
        arguments.json.write_text(json.dumps({"jax": jax.__version__, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
