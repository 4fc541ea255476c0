"""Every number a training run reports, with its unit and definition, and the JSONL file they are appended to."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from north_jax.data.jsonl import JsonLines, read_lines

# name: (unit, definition). A name that is not here cannot be written.
METRICS: dict[str, tuple[str, str]] = {
    # Every training step.
    "loss": ("nats", "SFT: sum(w * -log p) / sum(w) over the global batch. RL: the CISPO objective, negated."),
    "grad_norm": ("1", "Euclidean norm of the whole gradient before clipping."),
    "lr": ("1", "Learning rate of this step."),
    "tokens": ("tokens", "Tokens of the step's batch that are not padding."),
    "loss_tokens": ("tokens", "Tokens of the step's batch with a loss weight above 0."),
    "fill": ("share", "tokens / places of the batch."),
    "tokens_per_second": ("tokens/s", "tokens / step_seconds."),
    "tflops": ("TFLOP/s", "step_flops (train/flops.py) / step_seconds without wait_seconds / devices / 1e12."),
    "mfu": ("share", "tflops / the chip's bfloat16 peak by its data sheet; only where that is known."),
    "step_seconds": ("s", "Wall time from the end of the previous step to the end of this one."),
    "compile_seconds": ("s", "Wall time of the step that compiled, which is left out of tokens_per_second."),
    # Load of the experts, over the tokens of the step that are not padding and the layers with experts.
    "expert_load_max": ("1", "Tokens of the busiest expert / mean over the experts, of the worst layer: 1 to E / C."),
    "expert_load_entropy": ("1", "Mean over layers of -sum(s * log s) / log E, s the experts' shares: 1 when even."),
    "expert_dead_share": ("share", "Experts that no token chose / experts of all layers."),
    "expert_used_min": ("experts", "exp(-sum(s * log s)) of the worst layer: E when even, C when all tokens agree."),
    "expert_used_layer": ("layer", "The layer of expert_used_min, counted from 0."),
    # Reinforcement learning, per learner step.
    "reward": ("share", "Mean verifier reward (0 or 1) over the members of the step's groups that count."),
    "groups": ("groups", "Groups in the batch with unequal rewards, the ones that carry a gradient."),
    "filtered_groups": ("groups", "Finished groups taken and left out because all their rewards are equal."),
    "failed_groups": ("groups", "Groups given up since the last step because their environment kept failing."),
    "entropy": ("nats", "Mean over loss tokens of the entropy of the next-token distribution at temperature 1."),
    "ratio_mean": ("1", "Mean over loss tokens of p_learner / p_sampler, before the cap."),
    "ratio_max": ("1", "Largest p_learner / p_sampler over loss tokens."),
    "capped_share": ("share", "Share of loss tokens whose ratio lies above the cap."),
    "logp_gap_mean": ("nats", "Mean over loss tokens of |log p_learner - log p_sampler|."),
    "logp_gap_max": ("nats", "Largest |log p_learner - log p_sampler| over loss tokens."),
    "kl_k3": ("nats", "Mean over loss tokens of r - 1 - log r, r = p_learner / p_sampler."),
    "kl_k3_lag0": ("nats", "kl_k3 over the tokens that the learner's present weights drew; not in steps without any."),
    "lag_mean": ("steps", "Mean over loss tokens of the learner step minus the step of the weights that sampled it."),
    "lag_max": ("steps", "Largest lag over loss tokens."),
    "idle_share": ("share", "Share of the time since the previous step that the learner waited for rollouts."),
    "wait_seconds": ("s", "Time the learner waited for rollouts before this step."),
    "export_seconds": ("s", "Time to write the Hugging Face folder and have the sampler serve it."),
    "overtakes_max": ("groups", "Most younger groups that were trained before one of the step's groups."),
    "invalid_call_rate": ("share", "Tool calls that did not parse or named no tool / all completions of the step."),
    "out_of_budget_rate": ("share", "Rollouts that ended because their step or token budget was used up."),
    "turns_mean": ("turns", "Mean number of completions in a rollout."),
    "completion_tokens_mean": ("tokens", "Mean number of sampled tokens in a rollout."),
}


class MetricsWriter:
    """Appends one JSON object per step, {"step", "time", "stage", metric: value, …}, to `path`.

    `after_step` is the step a run was restored at: lines of later steps, and a last line cut short by a crash, are
    dropped from the file first. Steps are counted from 1. "time" is seconds since 1970.
    """

    def __init__(self, path: str | os.PathLike, *, after_step: int = 0):
        self.path = Path(path)
        if self.path.exists():
            kept = [line for line in read_metrics(self.path) if line["step"] <= after_step]
            temporary = self.path.with_name(self.path.name + ".tmp")
            temporary.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept))
            temporary.replace(self.path)
        self._lines = JsonLines(self.path)

    def write(self, step: int, values: Mapping[str, float], *, stage: str | None = None) -> None:
        """Raises KeyError for a name without a definition, ValueError for a value that is not finite."""
        line = {"step": step, "time": round(time.time(), 3)} | ({} if stage is None else {"stage": stage})
        for name, value in values.items():
            if name not in METRICS:
                raise KeyError(f"metric {name!r} has no definition: add its unit and meaning to train/metrics.py")
            line[name] = float(value)
            if not math.isfinite(line[name]):
                raise ValueError(f"metric {name!r} is {line[name]} at step {step}: leave out what has no value")
        self._lines.append(line, sync=False)

    def close(self) -> None:
        self._lines.close()


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """The lines of a metrics file. A last line without its newline was cut short by a crash and is left out.

    Raises ValueError naming the file and line for any other line that is not a JSON object with a step.
    """
    lines = list(read_lines(path))
    for number, line in enumerate(lines, 1):
        if "step" not in line:
            raise ValueError(f"{path}:{number} has no step, so it is no line of metrics: delete it, or move the file")
    return lines
