"""Batches of packed rows from a Grain dataset, in this process, with a position that saves and restores exactly."""

from collections.abc import Iterator

import grain
import numpy as np

from north_jax.data.packing import Packed


class BatchIterator(Iterator[dict[str, np.ndarray]]):
    """Endless batches {"ids_BS", "segment_ids_BS", "positions_BS", "weights_BS"} of `batch_rows` packed rows.

    Rows are shuffled anew in every epoch, from `seed` and the epoch's number alone; a batch may span two epochs, so
    every row is seen once per epoch. `get_state` / `set_state` hold the exact position (a JSON-serialisable dict).
    """

    def __init__(self, packed: Packed, batch_rows: int, *, seed: int):
        if batch_rows < 1:
            raise ValueError(f"batch_rows is {batch_rows}: a batch needs at least one row")
        rows = [packed.row(i) for i in range(len(packed))]
        dataset = grain.MapDataset.source(rows).shuffle(seed).repeat().batch(batch_rows)
        # The rows are in memory already: a thread pool would only cost time on them.
        self._iterator = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
        self.batches_per_epoch = -(-len(packed) // batch_rows)

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self._iterator)

    def get_state(self) -> dict:
        """The position after the last batch taken."""
        return self._iterator.get_state()

    def set_state(self, state: dict) -> None:
        """Moves to a position got from `get_state` of an iterator over the same rows, batch size and seed."""
        self._iterator.set_state(state)
