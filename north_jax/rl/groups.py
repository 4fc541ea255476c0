"""Groups of rollouts, and the file they are kept in."""

import dataclasses
import json
import os
from collections.abc import Iterator

import numpy as np

from north_jax.agents.episode import STATUSES
from north_jax.agents.rollout import Rollout
from north_jax.rl import advantages, journal


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


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """All rollouts of one prompt, admitted to the queue under one id when weights `version` were live."""

    id: int
    task: str
    members: tuple[Rollout, ...]
    attempt: int = 0
    version: int = 0

    def advantages(self) -> np.ndarray:
        """RLOO advantage of each member, float64."""
        rewards = [member.reward for member in self.members]
        return advantages.rloo(rewards, [member.valid for member in self.members], np.zeros(len(rewards), int))

    def has_signal(self) -> bool:
        """Whether any member has a non-zero advantage and a token to apply it to."""
        return any(a and any(member.mask) for a, member in zip(self.advantages(), self.members, strict=True))

    def to_json(self) -> dict:
        """Plain JSON."""
        return {
            "id": self.id,
            "attempt": self.attempt,
            "task": self.task,
            "version": self.version,
            "members": [rollout_to_json(member) for member in self.members],
        }

    @classmethod
    def from_json(cls, record: dict) -> "Group":
        """The inverse of `to_json`."""
        members = tuple(rollout_from_json(member) for member in record["members"])
        return cls(record["id"], record["task"], members, record["attempt"], record["version"])


class GroupFile:
    """rollouts.jsonl: finished groups, one a line, appended before the journal calls them finished."""

    def __init__(self, path: str | os.PathLike):
        self._lines = journal.JsonLines(path)
        self.note = self._lines.note

    def append(self, group: Group) -> int:
        """Writes the group through to the device; returns its byte offset, for `Journal.finish`.

        Raises ValueError naming a member that `check_rollout` refuses.
        """
        for member in group.members:
            check_rollout(member)
        return self._lines.append(group.to_json(), sync=True)

    def read(self, id: int, offset: int) -> Group:
        """The group the journal says starts at a byte offset. ValueError when it is not there."""
        with open(self._lines.path, "rb") as file:
            file.seek(offset)
            line = file.readline()
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and record.get("id") == id:
            return Group.from_json(record)
        raise ValueError(
            f"{self._lines.path} does not have group {id} at byte {offset}, where the journal says it is: "
            "restore both files from one copy, or start in a new workdir"
        )

    def close(self) -> None:
        """Flushes and closes."""
        self._lines.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def read_groups(path: str | os.PathLike) -> Iterator[Group]:
    """All groups of a rollouts file in the order of finishing; a restarted group may come once per attempt."""
    for record in journal.read_lines(path):
        yield Group.from_json(record)


def _runs(value_S: np.ndarray) -> list[list[int]]:
    """Run lengths: [value, count] pairs."""
    if not len(value_S):
        return []
    starts = np.flatnonzero(np.diff(value_S, prepend=value_S[0] - 1))
    counts = np.diff(starts, append=len(value_S))
    return [[int(value_S[start]), int(count)] for start, count in zip(starts, counts, strict=True)]
