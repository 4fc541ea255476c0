"""The whole line as one job: demonstrations, tokenizer, SFT, export, evaluation, RL, evaluation, report.

Every stage leaves its result in the workdir and is passed over when that is there, so the same command resumes.
"""

import contextlib
import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import jax
from flax import nnx
from ml_collections import ConfigDict

from north_jax import envs
from north_jax.agents.expert import read_demonstrations, record
from north_jax.agents.harness import HARNESSES
from north_jax.agents.rollout import Sampling
from north_jax.chat.format import FORMAT_PHRASES, ChatFormat, tool_phrases
from north_jax.chat.tokenizer import Tokenizer, train_tokenizer
from north_jax.data.jsonl import JsonLines
from north_jax.data.packing import Example, pack
from north_jax.envs.tasks import TEMPLATES, Task, Words, make_task, task_from_id, task_set
from north_jax.evals import run as evals
from north_jax.evals import summary
from north_jax.evals.report import build_report
from north_jax.evals.report_rollouts import record as report_line
from north_jax.model.config import ModelConfig
from north_jax.model.decoder import Decoder
from north_jax.parallel import make_mesh, processes
from north_jax.rl.groups import Group
from north_jax.rl.learner import queue_summary, run_rl
from north_jax.sampler.process import SamplerProcess
from north_jax.train.metrics import read_metrics
from north_jax.train.sft import run_sft
from north_jax.weights import hf


class Stages:
    """Wall seconds per stage on the first process, kept in workdir/stages.json and added up over resumes."""

    def __init__(self, workdir: Path):
        self._path = workdir / "stages.json"
        self.seconds: dict[str, float] = json.loads(self._path.read_text()) if self._path.exists() else {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if not processes.first():
            yield
            return
        print(f"== {name}", flush=True)
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started
            write_json(self._path, self.seconds)


def write_json(path: Path, value) -> None:
    """Writes a JSON file that is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1, ensure_ascii=False))
    os.replace(partial, path)


def check_templates(config: ConfigDict) -> dict[str, str]:
    """Template -> how often SFT shows it. Raises ValueError for a name that is unknown or in two of the lists."""
    exposure: dict[str, str] = {}
    for label, names in (
        ("common in SFT", config.tasks.common),
        ("rare in SFT", config.tasks.rare),
        ("never in training", config.tasks.never),
    ):
        for name in names:
            if name not in TEMPLATES:
                raise ValueError(f"config.tasks names the template {name!r}; known: {', '.join(sorted(TEMPLATES))}")
            if name in exposure:
                raise ValueError(f"config.tasks names the template {name!r} twice; keep it in one of the lists")
            exposure[name] = label
    return exposure


def demonstration_counts(config: ConfigDict) -> dict[str, int]:
    """Demonstrations per template."""
    return dict.fromkeys(config.tasks.common, config.demonstrations.common) | dict.fromkeys(
        config.tasks.rare, config.demonstrations.rare
    )


def make_tokenizer(config: ConfigDict, demonstrations: list[dict], path: Path) -> None:
    """Trains the demo's tokenizer on the demonstrations; fixed strings of the prompt format become single tokens."""

    def texts() -> Iterator[str]:
        for demonstration in demonstrations:
            for message in demonstration["messages"]:
                yield message.get("content") or ""
                yield message.get("thinking") or ""
                for call in message.get("tool_calls", ()):
                    yield from (json.dumps(value) for value in call["arguments"].values())
        # Names weigh more than English, so that whole syllables become tokens before anything across them does: a small
        # model copies a name it has never seen only if its tokens are ones it has seen thousands of times.
        for number in range(300):
            yield " ".join(Words(random.Random(number), "train").many(500))

    phrases = dict.fromkeys(FORMAT_PHRASES)
    for name in config.harnesses:
        harness = HARNESSES[name]
        phrases |= dict.fromkeys((*tool_phrases(harness.tools), *harness.phrases))
    train_tokenizer(texts(), path, vocab_size=config.vocab_size, phrases=tuple(phrases))


def sft_examples(demonstrations: list[dict], chat: ChatFormat) -> list[Example]:
    """Demonstrations as tokens with loss weights."""
    examples = []
    for d in demonstrations:
        rendered = chat.render_for_training(d["messages"], HARNESSES[d["harness"]].tools)
        examples.append(Example(f"{d['task']} ({d['harness']})", rendered.ids, rendered.weights))
    return examples


BACKENDS = ("attention", "moe", "exchange")  # of config.model: how the decoder computes, which no checkpoint holds


def model_config(config: ConfigDict, tokenizer: Tokenizer) -> ModelConfig:
    """The released architecture at the config's sizes, with the tokenizer's vocabulary."""
    sizes = {name: value for name, value in config.model.items() if name not in BACKENDS}
    return ModelConfig.from_hf(
        {
            "architectures": ["Cohere2MoeForCausalLM"],
            "model_type": "cohere2_moe",
            "first_k_dense_replace": 1,
            "prefix_dense_sliding_window_pattern": 1,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "num_shared_experts": 0,
            "rms_norm_eps": 1e-6,
            "rope_theta": 50000,
            "logit_scale": 1.0,
            "tie_word_embeddings": True,
            "vocab_size": tokenizer.vocab_size,
            "bos_token_id": tokenizer.bos,
            "eos_token_id": tokenizer.end_of_turn,
            "pad_token_id": tokenizer.pad,
            **sizes,
        }
    )


def run_pipeline(config: ConfigDict, workdir: Path) -> Path:
    """Runs all stages that are not done yet; returns the report's path.

    Of several processes, which all call this, the first one alone does what is not training.
    """
    exposure = check_templates(config)
    workdir.mkdir(parents=True, exist_ok=True)
    stage = Stages(workdir)
    mesh = make_mesh(**config.mesh)
    backends = {name: config.model.get(name, "auto") for name in BACKENDS}

    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(envs.SandboxPool(lambda: envs.make_sandbox(config.sandbox), config.sampling.slots))

        sft_model = workdir / "sft" / "model"
        sampler = SamplerProcess(
            sft_model, workdir, kind=config.sampler.kind, slots=config.sampling.slots, context=config.rl.row_length
        )
        stack.callback(sampler.stop)

        demonstrations_file = workdir / "demonstrations.jsonl"
        if processes.first() and not demonstrations_file.exists():
            with stage("demonstrations"):
                record(
                    demonstrations_file,
                    pool,
                    counts=demonstration_counts(config),
                    harnesses=config.harnesses,
                    mistake_share=config.demonstrations.mistake_share,
                    seed=config.seed,
                    workers=min(os.cpu_count() or 1, pool.size),
                )
        tokenizer_dir = workdir / "tokenizer"
        if processes.first() and not tokenizer_dir.exists():
            with stage("tokenizer"):
                make_tokenizer(config, read_demonstrations(demonstrations_file), tokenizer_dir)
        processes.meet()
        chat = ChatFormat(Tokenizer.load(tokenizer_dir))

        if processes.from_first(not sft_model.exists()):
            with stage("sft"):
                examples = sft_examples(read_demonstrations(demonstrations_file), chat)
                data = [pack(examples, s.row_length, leave_out_longer=True) for s in config.sft.stages]
                model = Decoder(model_config(config, chat.tokenizer), rngs=nnx.Rngs(config.seed), **backends)
                model = run_sft(model, data, config.sft, workdir / "sft", mesh)
                hf.save(sft_model, model, version="0", step=0, tokenizer_dir=tokenizer_dir)

        tasks = task_set(list(exposure), config.eval.tasks_per_template, split="heldout", seed=config.seed)
        sampled, greedy = _eval_plans(config, tasks)

        def evaluate(name: str, checkpoint: Path) -> tuple[summary.Played, summary.Played]:
            played = []
            for label, wanted, temperature, top_p in (
                ("sampled", sampled, config.eval.temperature, config.eval.top_p),
                ("near-greedy", greedy, config.eval.greedy_temperature, 1.0),
            ):
                path = workdir / f"eval_{name}" / f"{label}.jsonl"
                played.append(
                    evals.evaluate(
                        wanted,
                        path,
                        checkpoint=checkpoint,
                        chat=chat,
                        sampler=sampler,
                        pool=pool,
                        sampling=_sampling(config, temperature, top_p),
                        label=f"evaluation {name}, {label}",
                    )
                )
            return tuple(played)

        if processes.first():
            with stage("evaluation before"):
                before = evaluate("before", sft_model)

        rl_model = workdir / "rl" / "model"
        if processes.from_first(not rl_model.exists()):
            most = max(demonstration_counts(config).values())
            with stage("rl"), contextlib.ExitStack() as files:
                witness = None
                if processes.first():
                    witness = files.enter_context(_Witness(workdir / "rl" / "witness.jsonl", chat.tokenizer))
                model = run_rl(
                    hf.load(sft_model, mesh=mesh, **backends),
                    config.rl,
                    workdir / "rl",
                    mesh,
                    templates=(*config.tasks.common, *config.tasks.rare),
                    # Numbered past the demonstrations, so that RL meets tasks of its own.
                    make_task=lambda name, n: make_task(name, most + n, split="train", seed=config.seed),
                    task_from_id=lambda id: task_from_id(id, seed=config.seed),
                    harnesses=config.harnesses,
                    chat=chat,
                    sampler=sampler,
                    pool=pool,
                    sampling=_sampling(config, 1.0, 1.0),
                    witness=witness,
                )
                hf.save(
                    rl_model, model, version=str(config.rl.steps), step=config.rl.steps, tokenizer_dir=tokenizer_dir
                )

        if processes.first():
            with stage("evaluation after"):
                after = evaluate("after", rl_model)

    path = workdir / "report.html"
    if not processes.first():
        return path
    with stage("report"):
        results = _results(config, workdir, stage, tasks, summary.table(sampled, greedy, before, after, exposure))
        write_json(workdir / "results.json", results)
        _write_report_rollouts(workdir, chat.tokenizer, sampled, before[0], after[0])
        build_report(workdir)
    row = results["table"][0]
    print(
        f"held-out pass@1 {row['before']['pass_at_1'][0]:.3f} -> {row['after']['pass_at_1'][0]:.3f}, difference "
        f"{row['difference'][0]:+.3f} (95 % interval {row['difference'][1]:+.3f} to {row['difference'][2]:+.3f}); "
        f"near-greedy {row['before']['near_greedy'][0]:.3f} -> {row['after']['near_greedy'][0]:.3f}"
    )
    print(f"report: {path}")
    return path


def _sampling(config: ConfigDict, temperature: float, top_p: float) -> Sampling:
    return Sampling(temperature, top_p, config.sampling.max_new_tokens, config.rl.row_length)


def _eval_plans(config: ConfigDict, tasks: list[Task]) -> tuple[list[evals.Sample], list[evals.Sample]]:
    """What is sampled, and what is near-greedy (once per task and seed)."""
    seeds = config.eval.seeds
    return (
        evals.plan(tasks, config.harnesses, samples=config.eval.samples, seeds=seeds),
        evals.plan(tasks, config.harnesses, samples=1, seeds=seeds),
    )


class _Witness:
    """Keeps some rollouts of every tenth learner step with the learner's log-probabilities, for the report."""

    EVERY, MOST = 10, 12

    def __init__(self, path: Path, tokenizer: Tokenizer):
        self._lines, self._tokenizer, self._seen = JsonLines(path), tokenizer, {}

    def __enter__(self) -> "_Witness":
        return self

    def __exit__(self, *_) -> None:
        self._lines.close()

    def __call__(self, step: int, group: Group, member: int, advantage: float, logp_S) -> None:
        self._seen[step] = self._seen.get(step, 0) + 1
        if (step % self.EVERY and step != 1) or self._seen[step] > self.MOST:
            return
        line = report_line(
            group.members[member],
            self._tokenizer,
            where="rl",
            step=step,
            advantage=advantage,
            trainer_logprobs=logp_S.tolist(),
        )
        self._lines.append(line, sync=False)


def _write_report_rollouts(
    workdir: Path, tokenizer: Tokenizer, wanted: list[evals.Sample], before: summary.Played, after: summary.Played
) -> None:
    """report_rollouts.jsonl: those of learner steps, and the first sample of every held-out task before and after."""
    path = workdir / "report_rollouts.jsonl"
    with path.open("w") as out:
        witness = workdir / "rl" / "witness.jsonl"
        if witness.exists():
            with witness.open() as lines:
                shutil.copyfileobj(lines, out)
        for where, played in (("before", before), ("after", after)):
            for sample in wanted:
                if sample.seed == wanted[0].seed and sample.number == 0:
                    line = report_line(played[sample.key], tokenizer, where=where)
                    out.write(json.dumps(line, ensure_ascii=False) + "\n")


def _results(config: ConfigDict, workdir: Path, stage: Stages, tasks: list[Task], table: list[dict]) -> dict:
    """The contents of results.json; the schema is `evals/report.py`'s."""
    rl = read_metrics(workdir / "rl" / "metrics.jsonl")
    wall = sum(line["step_seconds"] for line in rl)
    model = hf.load(workdir / "rl" / "model")
    return {
        "title": "First light: a model that learned",
        "command": "make demo",
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "wall_s": sum(stage.seconds.values()),
        "hardware": {
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "device": jax.default_backend(),
        },
        "facts": {
            "Parameters": sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))),
            "Demonstrations": sum(demonstration_counts(config).values()),
            "Held-out tasks": len(tasks),
            "Learner steps": len(rl),
            "Rollouts trained on": sum(int(line["groups"]) for line in rl) * config.rl.group_size,
        },
        "settings": {
            "temperature": config.eval.temperature,
            "top_p": config.eval.top_p,
            "near_greedy_temperature": config.eval.greedy_temperature,
            "samples": config.eval.samples,
            "seeds": len(config.eval.seeds),
        },
        "stages": stage.seconds,
        "table": table,
        "rl": {
            "idle_share": sum(line["wait_seconds"] for line in rl) / wall,
            "kl_k3_lag0": max((line["kl_k3_lag0"] for line in rl if "kl_k3_lag0" in line), default=None),
            "lag_mean": sum(line["lag_mean"] * line["loss_tokens"] for line in rl)
            / sum(line["loss_tokens"] for line in rl),
            "lag_max": max(line["lag_max"] for line in rl),
            **queue_summary(workdir / "rl"),
        },
    }
