"""Measures one part of north_jax on this machine.

    python tools/bench.py convert --folder=DIR [--layers=9] [--rounds=3]
    python tools/bench.py sampler --folder=DIR [--sizes demo middle] [--rounds=3]
    python tools/bench.py train --folder=DIR [--rounds=3]
    python tools/bench.py kernels [--folder=benchmarks]

convert: writes a slice of North Mini Code at full width (hidden 2048, 128 experts, vocabulary 262,144; random finite
numbers) into DIR, then copies its files with `cp` and converts them in turn, each from a cold cache until everything
is on the disk. Prints seconds and GB/s of the source (medians over the rounds), the ratio to copying, and the peak
resident memory of the converting process. Wants three times the slice's size in DIR: 34 GB for 9 layers.

sampler: tokens/s of the embedded server, of transformers' `generate` and, where `make sglang` was run, of SGLang's
server, on one random model, float32, greedy, 32 prompt tokens and 128 new ones in each of 1, 8 and 32 rows; they take
turns, each while the others are stopped (SGLang's idle loop takes a core), and medians over the rounds count. "of
limit" is the embedded server's share of what this machine's memory bandwidth (each matrix that is needed read once a
step) and arithmetic would allow, both measured in the same run.

train: ms and tokens/s of a train step (AdamW, clipping, float32) of a tiny model and of the demo's, and of transformers
and PyTorch's, plain and under torch.compile, on the same weights and batch: they take turns, medians over the rounds
count. First both must have the same losses before and after a step; ours must not compile after its second step and
runs under jax.transfer_guard("disallow"). See tools/bench_train.py.

kernels: wants a TPU or a GPU; attention and the experts' layer beside what is installed (cuDNN, tokamax, PyTorch, what
jax ships), correctness first, in under 8 minutes. See tools/bench_kernels.py. Writes DIR/CHIP.json and DIR/CHIP.md.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

import ml_dtypes
import numpy as np
from flax import nnx

from north_jax.model import Decoder, ModelConfig
from north_jax.model.decoder import parameter_counts
from north_jax.pipeline import BACKENDS
from north_jax.sampler.process import SamplerProcess
from north_jax.weights import hf
from north_jax.weights.export import FolderWriter, Planned
from north_jax.weights.folder import drop_cache
from north_jax.weights.hf import write_configs
from north_jax.weights.names import manifest

ROOT = pathlib.Path(__file__).parents[1]
BF16 = np.dtype(ml_dtypes.bfloat16)
ROWS, PROMPT, NEW = (1, 8, 32), 32, 128
# What "middle" has other than the demo's model: 77 million parameters, too many for any cache near a core.
MIDDLE = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "head_dim": 64,
    "intermediate_size": 192,
    "prefix_dense_intermediate_size": 1024,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "vocab_size": 8192,
}


def slice_config(layers: int) -> ModelConfig:
    """The released architecture with its first `layers` layers."""
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


def sampler_config(size: str) -> ModelConfig:
    """The model of the demo, or the middle one."""
    from configs.demo import get_config

    fields = {name: value for name, value in get_config().model.items() if name not in BACKENDS}
    return ModelConfig(**fields | {"vocab_size": get_config().vocab_size} | (MIDDLE if size == "middle" else {}))


def prompts(config: ModelConfig, rows: int) -> list[list[int]]:
    """Random prompts, none of which is another's prefix."""
    return np.random.default_rng().integers(0, config.vocab_size, (rows, PROMPT)).tolist()


def time_server(url: str, ids: list[list[int]]) -> float:
    """Seconds until a server of SGLang's contract has completed all prompts."""
    params = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
    body = json.dumps({"input_ids": ids, "sampling_params": params}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json"})
    started = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        completions = json.load(answer)
    seconds = time.perf_counter() - started
    assert all(len(completion["output_ids"]) == NEW for completion in completions)
    return seconds


def time_transformers(folder: pathlib.Path, ids: list[list[int]]) -> float:
    """Seconds of transformers' `generate`. Loads the model at its first call; wants a process of its own."""
    import torch
    import transformers

    global _transformers_model
    if "_transformers_model" not in globals():
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        _transformers_model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(ids)
    started = time.perf_counter()
    with torch.inference_mode():
        out = _transformers_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            pad_token_id=0,
        )
    assert out.shape[1] == PROMPT + NEW
    return time.perf_counter() - started


def machine_limits(nbytes: int) -> tuple[float, float]:
    """(bytes/s when `nbytes` of matrix are read once for a vector, float32 operations/s of a large product)."""

    def best(function: Callable, times: int) -> float:
        seconds = []
        for _ in range(times):
            started = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    a_FD, x_D = np.ones((nbytes // 4 // 512, 512), np.float32), np.ones(512, np.float32)
    square = np.ones((2048, 2048), np.float32)
    return a_FD.nbytes / best(lambda: a_FD @ x_D, 20), 2 * 2048**3 / best(lambda: square @ square, 5)


def step_work(model: Decoder, rows: int) -> tuple[float, float]:
    """(bytes, operations) that a decode step of `rows` rows cannot do without, routing taken as even."""
    config, (total, active) = model.config, parameter_counts(model)
    expert = 3 * config.hidden_size * config.intermediate_size
    E, C, L = config.num_experts, config.num_experts_per_tok, config.num_hidden_layers
    L -= config.first_k_dense_replace
    hit = E * (1 - (1 - C / E) ** rows)
    unembedding = config.vocab_size * config.hidden_size
    return 4 * (total - L * (E - hit) * expert), 2.0 * rows * (active + unembedding)


def bench_sampler(folder: pathlib.Path, sizes: Sequence[str], rounds: int) -> None:
    """Prints the table of the module's docstring."""
    kinds = ["embedded"] + ["sglang"] * (ROOT / ".venv-sglang").exists()
    print(f"float32, greedy, {PROMPT} + {NEW} tokens, medians of {rounds} rounds, {os.cpu_count()} cores; tokens/s")
    for size in sizes:
        config, path = sampler_config(size), folder / f"sampler_{size}"
        model = Decoder(config, rngs=nnx.Rngs(0))
        hf.save(path, model, version="0", step=0)
        servers = {kind: SamplerProcess(path, folder / kind, kind=kind, slots=max(ROWS), context=256) for kind in kinds}
        seconds: dict[tuple[str, int], list[float]] = {}
        try:
            for server in servers.values():
                server.start()
                os.killpg(server.pid, signal.SIGSTOP)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
                for turn in range(rounds + 1):  # the first one warms up
                    for rows in ROWS:
                        ids = prompts(config, rows)
                        found = {}
                        for kind, server in servers.items():
                            os.killpg(server.pid, signal.SIGCONT)
                            found[kind] = time_server(server.url, ids)
                            os.killpg(server.pid, signal.SIGSTOP)
                        found["transformers"] = other.submit(time_transformers, path, ids).result()
                        for name, value in found.items():
                            seconds.setdefault((name, rows), []).extend([value] if turn else [])
        finally:
            for server in servers.values():
                if server.alive:
                    os.killpg(server.pid, signal.SIGCONT)
                server.stop()
        nbytes = 4 * parameter_counts(model)[0]
        bandwidth, arithmetic = machine_limits(nbytes)
        print(f"\n{size}: {nbytes / 1e6:.0f} MB of weights, {bandwidth / 1e9:.0f} GB/s, {arithmetic / 1e9:.0f} GFLOP/s")
        names = [*kinds, "transformers"]
        print(f"{'rows':>4s}" + "".join(f"{name:>14s}" for name in names) + f"{'ratio':>8s}{'of limit':>10s}")
        for rows in ROWS:
            speed = {name: rows * NEW / statistics.median(seconds[name, rows]) for name in names}
            read, operations = step_work(model, rows)
            limit = rows / max(read / bandwidth, operations / arithmetic)
            print(
                f"{rows:4d}"
                + "".join(f"{speed[name]:14,.0f}" for name in names)
                + f"{speed['embedded'] / speed['transformers']:8.2f}{speed['embedded'] / limit:10.1%}"
            )


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("convert", "sampler", "train", "kernels"))
    parser.add_argument("--folder", type=pathlib.Path, help="where to write; on the disk to be measured")
    parser.add_argument("--layers", type=int, default=9, help="9 layers are 11.4 GB")
    parser.add_argument("--sizes", nargs="+", choices=("demo", "middle"), default=("demo", "middle"))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT))  # for configs
    if arguments.what == "kernels":
        from bench_kernels import bench_kernels

        bench_kernels(arguments.folder or ROOT / "benchmarks", budget_s=400)
        return
    if arguments.folder is None:
        parser.error("--folder is needed: where to write; on the disk to be measured")
    if arguments.what == "convert":
        bench_convert(arguments.folder, arguments.layers, arguments.rounds)
    elif arguments.what == "train":
        from bench_train import bench_train

        bench_train(arguments.folder, sampler_config("demo"), arguments.rounds)
    else:
        bench_sampler(arguments.folder, arguments.sizes, arguments.rounds)


if __name__ == "__main__":
    main()
