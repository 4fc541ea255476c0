"""Measures one part of north_jax on this machine.

    python tools/bench.py convert --folder=DIR [--layers=9] [--rounds=3]

convert: writes a slice of North Mini Code at full width (hidden 2048, 128 experts, vocabulary 262,144; random finite
numbers) into DIR, then copies its files with `cp` and converts them in turn, each from a cold cache until everything
is on the disk. Prints seconds and GB/s of the source (medians over the rounds), the ratio to copying, and the peak
resident memory of the converting process. Wants three times the slice's size in DIR: 34 GB for 9 layers.
"""

import argparse
import dataclasses
import multiprocessing
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import ml_dtypes
import numpy as np
from flax import nnx

from north_jax.model import Decoder, ModelConfig
from north_jax.weights.export import FolderWriter, Planned
from north_jax.weights.folder import drop_cache
from north_jax.weights.hf import write_configs
from north_jax.weights.names import manifest

ROOT = pathlib.Path(__file__).parents[1]
BF16 = np.dtype(ml_dtypes.bfloat16)


def slice_config(layers: int) -> ModelConfig:
    """The released architecture with its first `layers` layers."""
    sys.path.insert(0, str(ROOT))
    from configs.model.north_mini_code import get_config

    whole = ModelConfig.from_hf(get_config().to_dict())
    return dataclasses.replace(whole, num_hidden_layers=layers, layer_types=whole.layer_types[:layers])


def write_slice(path: pathlib.Path, config: ModelConfig) -> int:
    """Writes a folder of this architecture with random finite bfloat16 values; returns its bytes."""

    def random(unit: tuple[Planned]) -> list[np.ndarray]:
        (tensor,) = unit
        bits = np.random.default_rng(zlib.crc32(tensor.name.encode())).integers(0, 1 << 16, tensor.shape, np.uint16)
        bits &= 0x81FF  # sign, the exponent's last two bits, mantissa
        bits |= 0x3C00  # values of 2^-7 … 2^-3
        return [bits.view(BF16)]

    entries = manifest(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    plan = [(Planned(name, entry.shape, BF16),) for name, entry in entries.items()]
    with FolderWriter(path, replace=True) as writer:
        write_configs(writer, config, BF16, None)
        writer.manifest(version=0, step=0, checksums=writer.weights(plan, random, threads=2))
    return sum(unit[0].nbytes for unit in plan)


def timed(command: Sequence[str | os.PathLike], source: pathlib.Path) -> tuple[float, float]:
    """(seconds until all is on the disk, peak resident memory in bytes) of a command that reads `source`."""
    os.sync()
    drop_cache(source)
    started = time.perf_counter()
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    os.sync()
    if status:
        raise RuntimeError(f"{command} ended with status {status}")
    return time.perf_counter() - started, usage.ru_maxrss * 1024.0


def bench_convert(folder: pathlib.Path, layers: int, rounds: int) -> None:
    """Prints the table of the module's docstring."""
    folder.mkdir(parents=True, exist_ok=True)
    source, orbax, target = folder / "slice", folder / "orbax", folder / "target"
    # In a process of its own: the ones that are measured begin with the peak memory of this one.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        size = other.submit(write_slice, source, slice_config(layers)).result()
    convert = [sys.executable, ROOT / "tools" / "convert.py"]
    runs = {
        "cp": ["cp", "-r", source, target],
        "hf -> orbax": [*convert, source, orbax, "--to=orbax"],
        "orbax -> hf": [*convert, orbax, target],
        "hf -> hf": [*convert, source, target],
        "hf -> hf, fp8": [*convert, source, target, "--quantise=fp8"],
    }
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        shutil.rmtree(orbax, ignore_errors=True)
        for name, command in runs.items():
            shutil.rmtree(target, ignore_errors=True)
            found.setdefault(name, []).append(timed(command, orbax if name == "orbax -> hf" else source))
    shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(orbax, ignore_errors=True)
    copying = statistics.median(seconds for seconds, _ in found["cp"])
    print(f"{layers} layers at full width, {size / 1e9:.2f} GB in bfloat16, {rounds} rounds, {os.cpu_count()} cores")
    print(f"{'':16s}{'seconds':>9s}{'GB/s':>7s}{'of cp':>8s}{'peak memory':>14s}")
    for name, results in found.items():
        seconds = statistics.median(seconds for seconds, _ in results)
        memory = max(memory for _, memory in results)
        print(f"{name:16s}{seconds:9.1f}{size / 1e9 / seconds:7.2f}{copying / seconds:8.0%}{memory / 1e9:11.2f} GB")


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("convert",))
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="where to write; on the disk to be measured")
    parser.add_argument("--layers", type=int, default=9, help="9 layers are 11.4 GB")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    bench_convert(arguments.folder, arguments.layers, arguments.rounds)


if __name__ == "__main__":
    main()
