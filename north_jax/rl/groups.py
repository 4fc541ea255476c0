"""Groups of rollouts, and the file they are kept in."""

import dataclasses
import json
import os
from collections.abc import Iterator

import numpy as np

from north_jax.agents.record import Rollout, check_rollout, rollout_from_json, rollout_to_json
from north_jax.data import jsonl
from north_jax.rl import advantages


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
        self._lines = jsonl.JsonLines(path)
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
    for record in jsonl.read_lines(path):
        yield Group.from_json(record)
