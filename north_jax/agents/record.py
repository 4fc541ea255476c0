"""One finished episode: its tokens, who drew them, and what came of it; and its form on disk."""

import dataclasses

import numpy as np

from north_jax.agents.episode import STATUSES


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One finished episode with all that training and the report need.

    ids [S] tokens of the conversation; mask [S] 1 where the sampler drew the token; logprobs [S] the sampler's
    log-probability of it (0 elsewhere); versions: (start, end, weight version) spans over ids, sampled tokens only.
    """

    task: str
    family: str
    template: str
    harness: str
    seed: int
    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int, str]]
    status: str
    detail: str
    turns: int
    seconds: float

    @property
    def reward(self) -> float:
        """Binary, the verifier's alone."""
        return float(self.status == "solved")

    @property
    def valid(self) -> bool:
        """False when the environment failed: no outcome of the policy, so no part of its group's baseline."""
        return self.status != "environment_failure"


def check_rollout(rollout: Rollout) -> None:
    """Raises ValueError naming the rollout where its tokens, mask, log-probabilities and versions do not fit."""
    where = f"rollout of task {rollout.task!r} with seed {rollout.seed}"
    lengths = {len(rollout.ids), len(rollout.mask), len(rollout.logprobs)}
    if len(lengths) > 1:
        raise ValueError(f"{where}: ids, mask and log-probabilities have lengths {sorted(lengths)}; check the harness")
    if rollout.status not in STATUSES:
        raise ValueError(f"{where}: status {rollout.status!r} is unknown; use one of {', '.join(STATUSES)}")
    action_S = np.array(rollout.mask, bool)
    if action_S[:1].any():
        raise ValueError(f"{where}: the first token is an action, but nothing predicts it; start with a prompt")
    logp_A = np.array(rollout.logprobs)[action_S]
    # Rounding may lift log 1 a little above 0.
    if not np.isfinite(logp_A).all() or (logp_A > 1e-3).any():
        raise ValueError(f"{where}: a recorded log-probability is not a finite number <= 0; check the sampler")
    if (version_S(rollout)[action_S] < 0).any():
        raise ValueError(f"{where}: the version spans do not cover every token that was drawn; check the sampler")


def version_S(rollout: Rollout) -> np.ndarray:
    """Weight version that drew each token, int32 [S], -1 where none did."""
    result_S = np.full(len(rollout.ids), -1, np.int32)
    for start, end, version in rollout.versions:
        result_S[start:end] = int(version)
    return result_S


def rollout_to_json(rollout: Rollout) -> dict:
    """Plain JSON: mask as run lengths, log-probabilities of drawn tokens only, in digits enough for their float32."""
    record = dataclasses.asdict(rollout)
    mask = np.array(rollout.mask, int)
    record["mask"] = _runs(mask)
    record["logprobs"] = [float(f"{x:.9g}") for x in np.array(rollout.logprobs, np.float32)[mask == 1].tolist()]
    record["seconds"] = round(rollout.seconds, 3)
    return record


def rollout_from_json(record: dict) -> Rollout:
    """The inverse of `rollout_to_json`. ValueError naming a field that is unknown or missing."""
    if odd := record.keys() ^ {field.name for field in dataclasses.fields(Rollout)}:
        raise ValueError(f"a stored rollout has or lacks {sorted(odd)}: it was written by another version of this code")
    mask = np.repeat([value for value, _ in record["mask"]], [count for _, count in record["mask"]]).astype(int)
    logprobs = np.zeros(len(mask))
    logprobs[mask == 1] = record["logprobs"]
    versions = [tuple(span) for span in record["versions"]]
    return Rollout(**record | {"mask": mask.tolist(), "logprobs": logprobs.tolist(), "versions": versions})


def _runs(value_S: np.ndarray) -> list[list[int]]:
    """Run lengths: [value, count] pairs."""
    if not len(value_S):
        return []
    starts = np.flatnonzero(np.diff(value_S, prepend=value_S[0] - 1))
    counts = np.diff(starts, append=len(value_S))
    return [[int(value_S[start]), int(count)] for start, count in zip(starts, counts, strict=True)]
