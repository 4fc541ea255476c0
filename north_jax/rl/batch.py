"""From the groups taken for a learner step to its packed arrays."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from north_jax.agents.record import version_S
from north_jax.data.packing import best_fit
from north_jax.rl import loss
from north_jax.rl.groups import Group

# Whether groups without variance in their rewards, whose advantages are all 0, count in the loss denominator.
ZERO_VARIANCE = ("keep", "drop")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where tokens [0, end - start) of a member's rollout lie: row `row`, places [start, end)."""

    group: int
    member: int
    row: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rollouts of one learner step.

    ids_BS, positions_BS: int32; segment_ids_BS: int32, 1, 2, … along a row, 0 at padding. action_BS: bool, trained
    tokens. logp_BS: float32, as recorded by the sampler; advantage_BS: float32; denominator_BS: float32, what the
    token's loss is divided by; version_BS: int32 weight version that drew the token, -1 where action_BS is False.
    tokens: trained tokens the denominators count. places: where each rollout lies.
    """

    ids_BS: np.ndarray
    segment_ids_BS: np.ndarray
    positions_BS: np.ndarray
    action_BS: np.ndarray
    logp_BS: np.ndarray
    advantage_BS: np.ndarray
    denominator_BS: np.ndarray
    version_BS: np.ndarray
    tokens: int
    places: tuple[Place, ...]

    @property
    def fill(self) -> float:
        """Share of the places that hold a token."""
        return float(np.mean(self.segment_ids_BS > 0))

    def arrays(self) -> dict[str, np.ndarray]:
        """What the learner step reads, by name."""
        names = ("ids_BS", "segment_ids_BS", "positions_BS", "action_BS", "logp_BS", "advantage_BS", "denominator_BS")
        return {name: getattr(self, name) for name in names}


def make_batch(
    groups: Sequence[Group],
    length: int,
    *,
    row_multiple: int = 8,
    zero_variance: str = "keep",
    aggregation: str = "token_mean",
) -> Batch:
    """Packs the rollouts with a non-zero advantage, each cut after its last action, into rows of `length` tokens.

    Rows are added up to a multiple of `row_multiple` (at least one multiple), so that only few shapes are compiled.
    The denominators follow `loss.denominators` over the valid rollouts; `zero_variance` says whether groups whose
    rewards are all equal count among them ("keep") or not ("drop").
    Raises ValueError naming a rollout that is longer than a row.
    """
    if zero_variance not in ZERO_VARIANCE:
        raise ValueError(f"zero_variance {zero_variance!r} is unknown: use one of {', '.join(ZERO_VARIANCE)}")
    counted, packed = [], []  # (group, member index), and those with their advantage
    for group in groups:
        advantages = group.advantages()
        for index, (member, advantage) in enumerate(zip(group.members, advantages, strict=True)):
            if member.valid and (zero_variance == "keep" or advantages.any()):
                counted.append((group.id, index, sum(member.mask)))
            if advantage and any(member.mask):
                packed.append((group.id, index, member, advantage))
    tokens_N = np.array([tokens for *_, tokens in counted], int)
    denominator_N = loss.denominators(tokens_N, [group for group, *_ in counted], aggregation, length)
    denominator_of = {(group, index): d for (group, index, _), d in zip(counted, denominator_N, strict=True)}

    ends = [int(np.flatnonzero(member.mask)[-1]) + 1 for *_, member, _ in packed]
    for end, (group, index, member, _) in zip(ends, packed, strict=True):
        if end > length:
            raise ValueError(
                f"member {index} of group {group} (task {member.task!r}) has {end} tokens, but a learner row holds "
                f"{length}: bound rollouts below it, or lengthen the rows"
            )
    bins = best_fit(ends, length)
    rows = max(1, -(-len(bins) // row_multiple)) * row_multiple

    arrays = {
        name: np.full((rows, length), empty, dtype)
        for name, empty, dtype in (
            ("ids_BS", 0, np.int32),
            ("segment_ids_BS", 0, np.int32),
            ("positions_BS", 0, np.int32),
            ("action_BS", False, bool),
            ("logp_BS", 0, np.float32),
            ("advantage_BS", 0, np.float32),
            ("denominator_BS", 1, np.float32),
            ("version_BS", -1, np.int32),
        )
    }
    places = []
    for row, members in enumerate(bins):
        start = 0
        for segment, n in enumerate(members, 1):
            (group, index, member, advantage), tokens = packed[n], ends[n]
            place = np.s_[row, start : start + tokens]
            arrays["ids_BS"][place] = member.ids[:tokens]
            arrays["segment_ids_BS"][place] = segment
            arrays["positions_BS"][place] = np.arange(tokens)
            arrays["action_BS"][place] = member.mask[:tokens]
            arrays["logp_BS"][place] = member.logprobs[:tokens]
            arrays["advantage_BS"][place] = advantage
            arrays["denominator_BS"][place] = denominator_of[group, index]
            arrays["version_BS"][place] = version_S(member)[:tokens]
            places.append(Place(group, index, row, start, start + tokens))
            start += tokens
    return Batch(**arrays, tokens=int(tokens_N.sum()), places=tuple(places))
