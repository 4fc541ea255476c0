"""Supervised fine-tuning over a cascade of context lengths, resumable at any step."""

import contextlib
import hashlib
import math
import time
from collections.abc import Sequence
from pathlib import Path

from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict
from tqdm import tqdm

from north_jax.data import BatchIterator, Packed
from north_jax.model import blocks
from north_jax.parallel import processes
from north_jax.train.expert_load import LoadAlarm
from north_jax.train.flops import step_flops, utilisation
from north_jax.train.interrupt import interrupts
from north_jax.train.loss import SFT
from north_jax.train.metrics import MetricsWriter
from north_jax.train.optimizer import make_schedule, optimizer_of
from north_jax.train.step import SETTINGS, init_state, make_train_step, restart, shard_batch
from north_jax.weights.checkpoint import CheckpointError, Checkpoints


def stage_config(**values) -> ConfigDict:
    """One stage: rows of `row_length` tokens, `batch_rows` of them a step, for `epochs` over the stage's rows.

    The learning rate rises to `lr` over `warmup` steps and then follows `decay` ("linear" or "cosine" to 0 at the
    stage's end, or "constant"). Raises KeyError for a name that is not a setting.
    """
    config = ConfigDict(
        {"row_length": 256, "batch_rows": 16, "epochs": 1.0, "lr": 1e-3, "warmup": 20, "decay": "linear"}
    )
    config.lock().update(values)
    return config


def sft_config(**values) -> ConfigDict:
    """The `sft` section of a run's config; `stages` is a tuple of `stage_config`, in order of training.

    `optimizer`, `moments`, `param_dtype`, `rounding` and `compute_dtype` are the choices of
    `north_jax.train.optimizer.make_optimizer`. A step takes its rows in `accumulate` parts; `remat` is one of
    `north_jax.model.blocks.REMAT`.
    `save_every` counts steps; the last step of a stage is saved too. `keep` checkpoints stay on disk.
    Raises KeyError for a name that is not a setting.
    """
    config = ConfigDict(
        {
            "seed": 0,
            "stages": (stage_config(),),
            **SETTINGS,
            "save_every": 100,
            "keep": 2,
        }
    )
    config.lock().update(values)
    return config


def stage_steps(packed: Packed, stage: ConfigDict) -> int:
    """Optimizer steps of a stage: epochs * rows / batch_rows, rounded up."""
    return math.ceil(stage.epochs * len(packed) / stage.batch_rows - 1e-9)


def run_sft(
    model: nnx.Module,
    data: Sequence[Packed],
    config: ConfigDict,
    workdir: str | Path,
    mesh: Mesh,
    *,
    progress: bool = True,
) -> nnx.Module:
    """Trains on `data[i]` in stage i of `config` (see `sft_config`) and returns the trained model.

    Every stage begins its own optimizer and schedule from the parameters of the one before. Takes over the arrays of
    `model`. Where workdir/checkpoints holds a checkpoint the run continues from it and ends, bit for bit, where it
    would have ended without a stop. Writes workdir/metrics.jsonl, steps counted from 1 over all stages.

    With several processes all call this with the same data, and the first one writes the metrics.

    SIGINT or SIGTERM, to any process, ends the running step, saves, and raises KeyboardInterrupt; a second SIGINT stops
    at once. Raises ValueError for data that do not fit the stages, CheckpointError when a checkpoint cannot be written
    or belongs to other data, FloatingPointError when the loss or the gradient is not finite.
    """
    workdir, stages = Path(workdir), list(config.stages)
    for number, (packed, stage) in enumerate(zip(data, stages, strict=True), 1):
        if packed.ids_BS.shape[1] != stage.row_length:
            raise ValueError(
                f"the data of SFT stage {number} are packed in rows of {packed.ids_BS.shape[1]} tokens but its "
                f"row_length is {stage.row_length}: pack them for the stage"
            )
    steps = [stage_steps(*pair) for pair in zip(data, stages, strict=True)]
    optimizers = [
        optimizer_of(
            config,
            make_schedule(stage.lr, count, warmup=stage.warmup, decay=stage.decay),
            seed=config.seed + index,
        )
        for index, (stage, count) in enumerate(zip(stages, steps, strict=True))
    ]
    digests = [_digest(packed, stage, config.seed) for packed, stage in zip(data, stages, strict=True)]

    with contextlib.ExitStack() as stack:
        checkpoints = Checkpoints(workdir / "checkpoints", keep=config.keep)
        stack.callback(checkpoints.close)
        model_config = model.config
        state = init_state(blocks.stack(model, config.remat), optimizers[0], mesh)
        restored = checkpoints.restore_latest(state)
        total, first, done, position = 0, 0, 0, None
        if restored is not None:
            total, state, extra = restored
            first, done, position = extra["stage"], extra["done"], extra["iterator"]
            if extra["data"] != digests:
                raise CheckpointError(
                    f"{checkpoints.directory} belongs to a run on other data, seed or batch_rows: use those again, or "
                    "another workdir"
                )
        writer = None
        if processes.first():
            writer = MetricsWriter(workdir / "metrics.jsonl", after_step=total)
            stack.callback(writer.close)
        interrupt = stack.enter_context(interrupts())

        for index in range(first, len(stages)):
            if index > first:
                state, done, position = restart(state, optimizers[index], mesh), 0, None
            stage, start = stages[index], total - done
            batches = BatchIterator(data[index], stage.batch_rows, seed=config.seed + index)
            if position is not None:
                batches.set_state(position)
            train_step = make_train_step(SFT, optimizers[index], mesh, accumulate=config.accumulate)
            label = f"SFT stage {index + 1}/{len(stages)}, {stage.row_length} tokens"
            bar = stack.enter_context(
                tqdm(
                    total=steps[index],
                    initial=done,
                    desc=label,
                    unit="step",
                    disable=not (progress and processes.first()),
                    dynamic_ncols=True,
                )
            )
            report = _Reporter(writer, bar, f"sft{index + 1}", mesh, LoadAlarm(model_config))
            while done < steps[index]:
                batch = next(batches)
                state, metrics = train_step(state, shard_batch(batch, mesh))
                done, total = done + 1, start + done + 1
                # The device has step N to do while the host waits for the metrics of step N - 1.
                report.dispatched(total, metrics, step_flops(model_config, batch["segment_ids_BS"]))
                stop = interrupt.agreed()
                if done % config.save_every == 0 or done == steps[index] or stop:
                    report.flush()  # a step whose numbers are not finite must not be saved
                    extra = {"stage": index, "done": done, "iterator": batches.get_state(), "data": digests}
                    checkpoints.save(total, state, extra)
                if stop:
                    checkpoints.wait()
                    raise KeyboardInterrupt
            bar.close()
        checkpoints.wait()
    return blocks.unstack(state.model())


class _Reporter:
    """Reads the metrics of a step only after the next one was dispatched, and times the steps by these reads."""

    def __init__(self, writer: MetricsWriter | None, bar: tqdm, stage: str, mesh: Mesh, alarm: LoadAlarm):
        self.writer, self.bar, self.stage, self.mesh, self.alarm = writer, bar, stage, mesh, alarm
        self.pending: tuple[int, dict, int] | None = None
        self.last, self.compiled = time.perf_counter(), False

    def dispatched(self, step: int, metrics: dict, flops: int) -> None:
        self.flush()
        self.pending = step, metrics, flops

    def flush(self) -> None:
        if self.pending is None:
            return
        (step, metrics, flops), self.pending = self.pending, None
        values = {name: float(value) for name, value in metrics.items()}
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        for name in ("loss", "grad_norm"):
            if not math.isfinite(values[name]):
                raise FloatingPointError(
                    f"{name} is {values[name]} at step {step} of stage {self.stage}: lower lr or raise warmup, and run "
                    "again from the last checkpoint"
                )
        if self.compiled:
            values |= {"step_seconds": seconds, "tokens_per_second": values["tokens"] / seconds}
            values |= utilisation(flops, seconds, self.mesh)
            self.bar.set_postfix_str(f"loss {values['loss']:.3f}, {values['tokens_per_second']:,.0f} tokens/s", False)
        else:
            values["compile_seconds"], self.compiled = seconds, True
        if self.writer is not None:
            self.writer.write(step, values, stage=self.stage)
            if sentence := self.alarm(step, values):
                tqdm.write(sentence)
        self.bar.update()


def _digest(packed: Packed, stage: ConfigDict, seed: int) -> str:
    # What the position of a data iterator refers to.
    digest = hashlib.sha256(f"{stage.batch_rows} {seed}".encode())
    for array in (packed.ids_BS, packed.segment_ids_BS, packed.weights_BS):
        digest.update(array.tobytes())
    return digest.hexdigest()
