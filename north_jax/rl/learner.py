"""The learner of asynchronous RL: P groups, one CISPO step, and every K steps new weights for the sampler."""

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict
from tqdm import tqdm

from north_jax.agents.rollout import Sampling
from north_jax.chat.format import ChatFormat
from north_jax.envs.pool import SandboxPool
from north_jax.envs.tasks import Task
from north_jax.model import blocks
from north_jax.parallel import processes
from north_jax.parallel.sharding import RULES
from north_jax.rl.batch import Batch, make_batch
from north_jax.rl.curriculum import Curriculum
from north_jax.rl.generation import Generation
from north_jax.rl.groups import Group, GroupFile
from north_jax.rl.journal import Journal, fold
from north_jax.rl.loss import cispo, mismatch_metrics
from north_jax.rl.queue import window_size
from north_jax.sampler.process import SamplerProcess
from north_jax.train.expert_load import LoadAlarm, load_metrics
from north_jax.train.flops import step_flops, utilisation
from north_jax.train.interrupt import interrupts
from north_jax.train.loss import Objective, token_logprobs
from north_jax.train.metrics import MetricsWriter
from north_jax.train.optimizer import make_schedule, optimizer_of
from north_jax.train.step import SETTINGS, TrainState, init_state, make_train_step, shard_batch
from north_jax.weights import hf
from north_jax.weights.checkpoint import Checkpoints

# A finished step with some of its rollouts, for the report: (step, group, member, advantage, trainer log-probs [S]).
Witness = Callable[[int, Group, int, float, np.ndarray], None]


def rl_config(**values) -> ConfigDict:
    """The `rl` section of a run's config. KeyError for a name that is not a setting.

    steps: learner steps. group_size: rollouts a task. groups_per_step: P, groups with signal a step. queue_groups: N,
    groups admitted and not yet released. window: the queue's W is max(1, floor(window * N)). export_every: K, learner
    steps between exports to the sampler. lr rises over `warmup` steps and stays. optimizer, moments, param_dtype,
    rounding, compute_dtype: the choices of `north_jax.train.optimizer.make_optimizer`; accumulate, remat: as in
    `north_jax.train.sft.sft_config`. ratio_cap: absolute cap on the importance ratio. row_length: tokens of a learner
    row, and the most a rollout may have. save_every: steps between checkpoints.
    """
    config = ConfigDict(
        {
            "seed": 0,
            "steps": 100,
            "group_size": 8,
            "groups_per_step": 8,
            "queue_groups": 16,
            "window": 0.3,
            "export_every": 4,
            "lr": 5e-4,
            "warmup": 5,
            **SETTINGS,
            "ratio_cap": 5.0,
            "row_length": 512,
            "save_every": 20,
            "keep": 2,
        }
    )
    config.lock().update(values)
    return config


def make_rl_objective(ratio_cap: float) -> Objective:
    """CISPO against the sampler's recorded log-probabilities, at temperature 1, with its metrics.

    The metric "logp_BS" is no scalar: the learner's log-probabilities of the batch, for the report.
    """

    def objective(logp_BS, batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        return cispo(
            logp_BS,
            batch["logp_BS"],
            batch["advantage_BS"],
            batch["action_BS"],
            ratio_cap=ratio_cap,
            denominator=batch["denominator_BS"],
        )

    def loss(model: nnx.Module, batch, whole) -> tuple[jax.Array, dict[str, jax.Array]]:
        logp_BS, entropy_BS, counts_LE = token_logprobs(
            model,
            batch["ids_BS"],
            batch["segment_ids_BS"],
            batch["positions_BS"],
            with_entropy=True,
            with_counts=True,
        )
        # The denominators are those of the whole batch.
        arrays = {"logp_BS": logp_BS, "entropy_BS": entropy_BS, "counts_LE": counts_LE}
        return objective(logp_BS, batch)[0], arrays

    def metrics(batch, arrays) -> dict[str, jax.Array]:
        action_BS, logp_BS = batch["action_BS"], arrays["logp_BS"]
        _, clipped = objective(logp_BS, batch)
        gap = mismatch_metrics(logp_BS, batch["logp_BS"], action_BS)
        tokens = (batch["segment_ids_BS"] > 0).sum()
        return {
            "tokens": tokens,
            "loss_tokens": clipped["tokens"],
            "fill": tokens / action_BS.size,
            "entropy": jnp.where(action_BS, arrays["entropy_BS"], 0.0).sum() / jnp.maximum(action_BS.sum(), 1),
            "ratio_mean": clipped["ratio_mean"],
            "ratio_max": clipped["ratio_max"],
            "capped_share": clipped["clip_high_frac"],
            "logp_gap_mean": gap["abs_logp_diff_mean"],
            "logp_gap_max": gap["abs_logp_diff_max"],
            "kl_k3": gap["k3"],
            **load_metrics(arrays["counts_LE"]),
            "logp_BS": logp_BS,
        }

    return Objective(loss, metrics)


def rollout_metrics(groups: list[Group], batch: Batch, logp_BS: np.ndarray, step: int) -> dict[str, float]:
    """Metrics of the step that come from its rollouts and the learner's log-probabilities of them.

    `step` counts the learner steps done before it.
    """
    members = [m for group in groups for m in group.members if m.valid]
    lag_A = step - batch.version_BS[batch.action_BS]
    turns = sum(m.turns for m in members)
    gap_A = (logp_BS.astype(np.float64) - batch.logp_BS)[batch.action_BS][lag_A == 0]
    fresh = {"kl_k3_lag0": float(np.mean(np.expm1(gap_A) - gap_A))} if gap_A.size else {}
    return fresh | {
        "groups": len(groups),
        "reward": float(np.mean([m.reward for m in members])),
        "lag_mean": float(lag_A.mean()),
        "lag_max": float(lag_A.max()),
        "invalid_call_rate": sum(m.status == "invalid_action" for m in members) / max(turns, 1),
        "out_of_budget_rate": float(np.mean([m.status == "out_of_budget" for m in members])),
        "turns_mean": float(np.mean([m.turns for m in members])),
        "completion_tokens_mean": float(np.mean([sum(m.mask) for m in members])),
    }


class _Exports:
    """The weight folders of a run: one a version, the older ones removed when the sampler no longer reads them."""

    def __init__(self, folder: Path, tokenizer: Path):
        self.folder, self._tokenizer = folder, tokenizer

    def write(self, state: TrainState, version: int) -> Path:
        """On all processes."""
        path = self.folder / f"v{version:06d}"
        if processes.first() and path.exists():  # of a learner step that was lost
            shutil.rmtree(path)
        hf.save(path, blocks.unstack(state.model()), version=str(version), step=version, tokenizer_dir=self._tokenizer)
        return path

    def keep_only(self, path: Path) -> None:
        for other in self.folder.iterdir():
            if other != path:
                shutil.rmtree(other, ignore_errors=True)


def run_rl(
    model: nnx.Module,
    config: ConfigDict,
    workdir: Path,
    mesh: Mesh,
    *,
    templates: Sequence[str],
    make_task: Callable[[str, int], Task],
    task_from_id: Callable[[str], Task],
    harnesses: tuple[str, ...],
    chat: ChatFormat,
    sampler: SamplerProcess,
    pool: SandboxPool,
    sampling: Sampling,
    witness: Witness,
) -> nnx.Module:
    """Trains `model` by asynchronous RL and returns it; see `rl_config`. Takes over the model's arrays.

    `make_task(template, number)` is the task of
    the number-th group, `task_from_id` its inverse by the task's id. The sampler is handed
    the weights the run begins with, and started if it does not run. Writes
    under workdir: journal.jsonl, rollouts.jsonl, metrics.jsonl, checkpoints/, weights/. Where checkpoints are, the run
    continues from the newest: groups of lost steps are trained again, groups in flight start again under their ids.

    With several processes all call this. The first one has the queue, the sampler and the sandboxes, writes the files
    and hands every batch to the others, which take the learner's steps with it; their `sampler`, `pool` and `witness`
    are not used.

    SIGINT or SIGTERM to the first process ends the running step, to others the one after it; the run saves and raises
    KeyboardInterrupt. A second SIGINT stops at once.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    schedule = make_schedule(config.lr, config.steps, warmup=config.warmup, decay="constant")
    optimizer = optimizer_of(config, schedule, seed=config.seed)
    with contextlib.ExitStack() as stack:
        checkpoints = Checkpoints(workdir / "checkpoints", keep=config.keep)
        stack.callback(checkpoints.close)
        model_config = model.config
        state = init_state(blocks.stack(model, config.remat), optimizer, mesh)
        restored = checkpoints.restore_latest(state)
        step = 0
        if restored is not None:
            step, state, _ = restored
        exports = _Exports(workdir / "weights", chat.tokenizer.path)
        exports.folder.mkdir(exist_ok=True)
        exported = exports.write(state, step)
        first = processes.first()
        if first:
            sampler.checkpoint = exported
            journal = stack.enter_context(
                Journal(
                    workdir / "journal.jsonl",
                    step=step,
                    capacity=config.queue_groups,
                    window=window_size(config.window, config.queue_groups),
                )
            )
            file = stack.enter_context(GroupFile(workdir / "rollouts.jsonl"))
            writer = MetricsWriter(workdir / "metrics.jsonl", after_step=step)
            stack.callback(writer.close)
            generation = Generation(
                journal=journal,
                file=file,
                curriculum=Curriculum(templates, make_task, group_size=config.group_size, seed=config.seed),
                task_from_id=task_from_id,
                group_size=config.group_size,
                harnesses=harnesses,
                chat=chat,
                sampler=sampler,
                pool=pool,
                sampling=sampling,
                version=step,
                seed=config.seed,
            )
            generation.start()
            stack.callback(generation.stop)
            bar = stack.enter_context(
                tqdm(total=config.steps, initial=step, desc="RL", unit="step", dynamic_ncols=True, smoothing=0.1)
            )
        interrupt = stack.enter_context(interrupts())
        train_step = make_train_step(make_rl_objective(config.ratio_cap), optimizer, mesh, accumulate=config.accumulate)
        # The rows of a batch divide over the devices that split it.
        row_multiple = math.lcm(8, math.prod(mesh.shape[axis] for axis in RULES["batch"]))
        last, alarm = time.perf_counter(), LoadAlarm(model_config)
        while step < config.steps:
            waiting = time.perf_counter()
            arrays = None
            if first:
                before = journal.queue.stats(step)
                groups = generation.take(config.groups_per_step, interrupt.event)
                if not interrupt.event.is_set():
                    batch = make_batch(groups, config.row_length, row_multiple=row_multiple)
                    arrays = batch.arrays()
            arrays = processes.from_first(arrays)
            if arrays is None or interrupt.agreed():
                _save(checkpoints, step, state)
                raise KeyboardInterrupt
            wait_seconds = time.perf_counter() - waiting
            state, on_device = train_step(state, shard_batch(arrays, mesh))
            logp_BS = processes.on_host(on_device.pop("logp_BS"))
            values = {name: float(value) for name, value in on_device.items()}
            if not np.isfinite([values["loss"], values["grad_norm"]]).all():
                raise FloatingPointError(
                    f"the loss is {values['loss']}, the gradient norm {values['grad_norm']} at RL step {step + 1}: "
                    "lower config.rl.lr and run again from the last checkpoint"
                )
            step += 1
            exporting = time.perf_counter()
            exported = None
            if step % config.export_every == 0 or step == config.steps:
                exported = exports.write(state, step)
            if first:
                _show(witness, step, groups, batch, logp_BS)
                values |= rollout_metrics(groups, batch, logp_BS, step - 1)
                if exported is not None:
                    generation.publish(exported, step)
                    exports.keep_only(exported)
                    values["export_seconds"] = time.perf_counter() - exporting
                after = generation.stepped(reward=values["reward"])
                now = time.perf_counter()
                values |= {
                    "wait_seconds": wait_seconds,
                    "step_seconds": now - last,
                    "idle_share": wait_seconds / (now - last),
                    "filtered_groups": after["filtered"] - before["filtered"],
                    "failed_groups": after["failed"] - before["failed"],
                    "overtakes_max": after["max_overtakes"],
                }
                flops = step_flops(model_config, arrays["segment_ids_BS"])
                values |= utilisation(flops, now - last - wait_seconds, mesh)
                last = now
                writer.write(step, values)
                if sentence := alarm(step, values):
                    tqdm.write(sentence)
                bar.set_postfix_str(
                    f"reward {values['reward']:.2f}, lag {values['lag_mean']:.1f}, idle {values['idle_share']:.0%}",
                    False,
                )
                bar.update()
            if step % config.save_every == 0 or step == config.steps:
                _save(checkpoints, step, state)
        checkpoints.wait()
    return blocks.unstack(state.model())


def _save(checkpoints: Checkpoints, step: int, state: TrainState) -> None:
    if step not in checkpoints.steps:
        checkpoints.save(step, state, {})
    checkpoints.wait()


def _show(witness: Witness, step: int, groups: list[Group], batch: Batch, logp_BS: np.ndarray) -> None:
    by_id = {group.id: group for group in groups}
    for place in batch.places:
        group = by_id[place.group]
        member = group.members[place.member]
        logp_S = np.zeros(len(member.ids), np.float32)
        logp_S[: place.end - place.start] = logp_BS[place.row, place.start : place.end]
        witness(step, group, place.member, float(group.advantages()[place.member]), logp_S)


def queue_summary(workdir: Path) -> dict:
    """What became of the groups, and the lag of the trained ones, from the journal; for the report."""
    state = fold(workdir / "journal.jsonl")
    stats = state.queue.stats(state.step)
    held = stats["running"] + stats["waiting"] + stats["taken"]
    lags, counts = np.unique(np.array(state.lags, int), return_counts=True)
    return {
        "lag_histogram": {str(lag): int(count) for lag, count in zip(lags, counts, strict=True)},
        "queue": {
            "admitted": stats["admitted"],
            "trained": stats["trained"],
            "filtered": stats["filtered"],
            "failed": stats["failed"],
            "open": held,
        },
    }
