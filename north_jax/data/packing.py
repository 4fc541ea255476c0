"""Best-fit packing of whole token sequences into rows of one length. Nothing is ever truncated."""

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Example:
    """One token sequence and the loss weight of each of its tokens as a target; `name` is what errors call it."""

    name: str
    ids: Sequence[int]
    weights: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows of packed examples.

    ids_BS: int32 token ids, 0 where padded. segment_ids_BS: int32, 1, 2, … along a row, 0 where padded.
    positions_BS: int32, from 0 in every segment. weights_BS: float32 loss weight of the token as a target, 0 where
    padded and at the first token of a segment, which nothing predicts. left_out: examples longer than a row.
    """

    ids_BS: np.ndarray
    segment_ids_BS: np.ndarray
    positions_BS: np.ndarray
    weights_BS: np.ndarray
    left_out: int

    def __len__(self) -> int:
        return self.ids_BS.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int(np.count_nonzero(self.segment_ids_BS))

    @property
    def fill(self) -> float:
        """Share of the rows' places that hold a token."""
        return self.tokens / max(1, self.segment_ids_BS.size)

    def row(self, index: int) -> dict[str, np.ndarray]:
        """One row as the dict of arrays a batch is stacked from."""
        return {
            "ids_BS": self.ids_BS[index],
            "segment_ids_BS": self.segment_ids_BS[index],
            "positions_BS": self.positions_BS[index],
            "weights_BS": self.weights_BS[index],
        }


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: longest first, each into the fullest bin that still holds it, else into a new bin.

    Returns bins of indices into `lengths`; equal lengths keep their order. O(n log n) comparisons.
    Raises ValueError for a length outside 1..capacity. Source: Ding et al., arXiv 2404.10830.
    """
    bins: list[list[int]] = []
    rooms: list[int] = []  # the distinct free rooms, ascending; a bin with no room left is in neither
    bins_with_room: dict[int, list[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if not 1 <= length <= capacity:
            raise ValueError(f"sequence {index} has length {length}, but a bin holds 1 to {capacity}: filter it first")
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            bins.append([])
            chosen, room = len(bins) - 1, capacity
        else:
            room = rooms[place]
            chosen = bins_with_room[room].pop()
            if not bins_with_room[room]:
                del bins_with_room[room], rooms[place]
        bins[chosen].append(index)
        room -= length
        if room:
            if room not in bins_with_room:
                bisect.insort(rooms, room)
                bins_with_room[room] = []
            bins_with_room[room].append(chosen)
    return bins


def pack(examples: Sequence[Example], row_length: int, *, leave_out_longer: bool = False) -> Packed:
    """Packs whole examples into rows of `row_length` tokens.

    An example longer than a row is refused by name, or counted in `Packed.left_out` when `leave_out_longer` is set
    (the first stage of a context cascade trains on what fits).
    Raises ValueError also for an empty example, weights that do not match the ids, an example that trains nothing,
    and when no example is left.
    """
    kept, left_out = [], 0
    for example in examples:
        if len(example.ids) != len(example.weights):
            raise ValueError(
                f"example {example.name} has {len(example.ids)} ids but {len(example.weights)} weights: "
                "give one weight per token"
            )
        if len(example.ids) > row_length:
            if not leave_out_longer:
                raise ValueError(
                    f"example {example.name} has {len(example.ids)} tokens, but a row holds {row_length}: "
                    "raise row_length or pass leave_out_longer=True"
                )
            left_out += 1
            continue
        if not any(example.weights[1:]):
            raise ValueError(
                f"example {example.name} has no token with a loss weight after its first: "
                "drop it, or give its conversation an assistant turn that is trained"
            )
        kept.append(example)
    if not kept:
        raise ValueError(f"no example fits a row of {row_length} tokens ({left_out} are longer): raise row_length")

    rows = best_fit([len(example.ids) for example in kept], row_length)
    ids_BS = np.zeros((len(rows), row_length), np.int32)
    segment_ids_BS = np.zeros_like(ids_BS)
    positions_BS = np.zeros_like(ids_BS)
    weights_BS = np.zeros(ids_BS.shape, np.float32)
    for row, members in enumerate(rows):
        start = 0
        for segment, member in enumerate(members, 1):
            end = start + len(kept[member].ids)
            ids_BS[row, start:end] = kept[member].ids
            segment_ids_BS[row, start:end] = segment
            positions_BS[row, start:end] = np.arange(end - start)
            weights_BS[row, start + 1 : end] = kept[member].weights[1:]
            start = end
    return Packed(ids_BS, segment_ids_BS, positions_BS, weights_BS, left_out)
