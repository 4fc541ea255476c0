"""`tools/bench.py train`: our train step beside transformers' training of the same folder on the same batch.

Each contestant lives in a process of its own and waits while another has its turn. transformers' model class trains
with sdpa attention and PyTorch's fused AdamW, once for each way to compute experts that is fast on a CPU, and once
under torch.compile.
"""

import contextlib
import json
import multiprocessing
import os
import pathlib
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from north_jax.model import blocks
from north_jax.parallel import make_mesh
from north_jax.train.loss import SFT
from north_jax.train.optimizer import make_optimizer, make_schedule
from north_jax.train.step import init_state, make_train_step, shard_batch
from north_jax.weights import hf

# How transformers computes experts, and whether under torch.compile. (batched_mm copies an expert for every token.)
THEIRS = {"eager": ("eager", False), "grouped_mm": ("grouped_mm", False), "grouped_mm, compiled": ("grouped_mm", True)}
ADAMW = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-8}
BETAS, CLIP = (0.9, 0.95), 1.0
STEPS = 4  # of a turn
# The model that tests hold against transformers' own outputs: 64 wide, five layers, 8 experts.
TINY = pathlib.Path(__file__).parents[1] / "tests/data/oracle/seed0"
TINY_BATCHES = (2, 64), (4, 64), (4, 128), (8, 256)
SAME = 1e-5  # how far losses may lie apart


class Times(NamedTuple):
    """Seconds a step: by the clock, and of all threads of the process, which other load on the machine changes less."""

    wall: float
    cpu: float


class Ours:
    """The step of SFT and RL on one device."""

    def __init__(self, folder: pathlib.Path, ids_BS: np.ndarray):
        mesh = make_mesh(devices=jax.devices()[:1])
        schedule = make_schedule(ADAMW["lr"], 1, decay="constant")
        options = {"weight_decay": ADAMW["weight_decay"], "eps": ADAMW["eps"]}
        optimizer = make_optimizer(schedule, b1=BETAS[0], b2=BETAS[1], clip=CLIP, **options)
        self.state = init_state(blocks.stack(hf.load(folder)), optimizer, mesh)
        self.step = make_train_step(SFT, optimizer, mesh)
        B, S = ids_BS.shape
        batch = {
            "ids_BS": ids_BS.astype(np.int32),
            "segment_ids_BS": np.ones((B, S), np.int32),
            "positions_BS": np.tile(np.arange(S, dtype=np.int32), (B, 1)),
            "weights_BS": np.tile(np.float32(np.arange(S) > 0), (B, 1)),  # nothing predicts a first token
        }
        self.batch = shard_batch(batch, mesh)
        self.compiled = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, *_, **__) -> None:
        self.compiled += event == "/jax/core/compile/backend_compile_duration"

    def steps(self, count: int) -> list[float]:
        """Takes steps without any transfer to or from the host in between; the losses, read after them."""
        losses = []
        with jax.transfer_guard("disallow"):
            for _ in range(count):
                self.state, metrics = self.step(self.state, self.batch)
                losses.append(metrics["loss"])
            jax.block_until_ready(self.state)
        return [float(loss) for loss in losses]


class Theirs:
    """transformers' model in training mode, with PyTorch's AdamW and clipping."""

    compiled = 0

    def __init__(self, folder: pathlib.Path, ids_BS: np.ndarray, experts: str, compiled: bool):
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA takes
        self.torch, self.ids_BS = torch, torch.tensor(ids_BS)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation=experts
        ).train()
        params = list(self.model.parameters())
        groups = [
            {"params": [p for p in params if p.ndim > 1]},
            {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS, fused=True, **ADAMW)
        self.forward = torch.compile(self.model) if compiled else self.model

    def steps(self, count: int) -> list[float]:
        """Takes steps; the losses, read after them."""
        losses = []
        for _ in range(count):
            loss = self.forward(input_ids=self.ids_BS, labels=self.ids_BS, use_cache=False).loss
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]


def _start(name: str, folder: pathlib.Path, ids_BS: np.ndarray) -> None:
    global _contestant
    _contestant = Theirs(folder, ids_BS, *THEIRS[name]) if name in THEIRS else Ours(folder, ids_BS)


def _turn(count: int) -> tuple[Times, list[float], int]:
    """(times of `count` steps, their losses, compilations of this process so far)."""
    wall, cpu = time.perf_counter(), time.process_time()
    losses = _contestant.steps(count)
    return (
        Times((time.perf_counter() - wall) / count, (time.process_time() - cpu) / count),
        losses,
        _contestant.compiled,
    )


def random_batch(vocab_size: int, rows: int, length: int) -> np.ndarray:
    """Rows of one document each, without id 0: transformers gives a padding token no gradient as an input."""
    return np.random.default_rng(0).integers(1, vocab_size, (rows, length))


def check_losses(found: Mapping[str, list[float]]) -> None:
    """Raises RuntimeError where a contestant's losses differ by more than SAME from those of "ours"."""
    for name, losses in found.items():
        if not np.allclose(losses, found["ours"], rtol=0, atol=SAME):
            raise RuntimeError(f"the losses of {name}, {losses}, are not those of ours, {found['ours']}")


def race(
    folder: pathlib.Path, ids_BS: np.ndarray, *, rounds: int, steps: int, theirs: Sequence[str] = tuple(THEIRS)
) -> dict[str, list[Times]]:
    """The times of each round, by contestant: "ours" and `theirs`.

    Raises RuntimeError where losses differ (`check_losses`) before or after the first step, or ours compiles after its
    second step.
    """
    with contextlib.ExitStack() as stack:
        spawn = multiprocessing.get_context("spawn")
        others = {
            name: stack.enter_context(
                ProcessPoolExecutor(1, spawn, initializer=_start, initargs=(name, folder, ids_BS))
            )
            for name in ("ours", *theirs)
        }

        def turns(count: int) -> dict[str, tuple[Times, list[float], int]]:
            return {name: other.submit(_turn, count).result() for name, other in others.items()}

        first = turns(2)
        check_losses({name: losses for name, (_, losses, _) in first.items()})
        turns(steps)
        results = [turns(steps) for _ in range(rounds)]
        if compiled := results[-1]["ours"][2] - first["ours"][2]:
            raise RuntimeError(f"our step was compiled {compiled} times after its second step")
    return {name: [result[name][0] for result in results] for name in others}


def bench_train(folder: pathlib.Path, config, rounds: int) -> None:
    """Prints a table for each batch of two models: the tiny one of the reference outputs, and the demo's."""
    from flax import nnx

    from configs.demo import get_config
    from north_jax.model import Decoder

    # Both sides' allocators under what `make demo` sets.
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    demo = folder / "train"
    hf.save(demo, Decoder(config, rngs=nnx.Rngs(0)), version="0", step=0)
    stages = [(stage.batch_rows, stage.row_length) for stage in get_config().sft.stages]
    print(
        f"float32, medians of {rounds} rounds of {STEPS} steps, {len(os.sched_getaffinity(0))} cores; ours / the other"
    )
    for name, path, batches in (("the tiny model", TINY, TINY_BATCHES), ("the demo's model", demo, stages)):
        vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
        for rows, length in batches:
            found = race(path, random_batch(vocab_size, rows, length), rounds=rounds, steps=STEPS)
            print(f"\n{name}, {rows} rows of {length}: losses within {SAME}, no compilation after step 2, no transfer")
            print(f"{'':24s}{'ms':>8s}{'tokens/s':>10s}{'ratio':>7s}{'CPU ms':>9s}{'ratio':>7s}")
            medians = {who: Times(*map(statistics.median, zip(*times, strict=True))) for who, times in found.items()}
            for who, (wall, cpu) in medians.items():
                ratios = wall / medians["ours"].wall, cpu / medians["ours"].cpu
                print(
                    f"{who:24s}{wall * 1e3:8.1f}{rows * length / wall:10,.0f}{ratios[0]:7.2f}"
                    f"{cpu * 1e3:9.1f}{ratios[1]:7.2f}",
                    flush=True,
                )
