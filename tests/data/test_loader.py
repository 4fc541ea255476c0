import json

import numpy as np
import pytest

from north_jax.data import BatchIterator, Example, pack


@pytest.fixture(scope="module")
def packed():
    return pack([Example(f"e{i}", [i + 1] * 8, [1.0] * 8) for i in range(10)], 8)  # ten rows, one value each


def rows(batches):
    return np.concatenate([batch["ids_BS"][:, 0] for batch in batches]).tolist()


def test_every_epoch_has_every_row_once_in_a_new_order(packed):
    iterator = BatchIterator(packed, 4, seed=1)
    assert iterator.batches_per_epoch == 3
    seen = rows([next(iterator) for _ in range(10)])  # 40 rows: four epochs, batches across their borders
    epochs = [seen[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(1, 11)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_seed_decides_the_order(packed):
    first, same, other = (BatchIterator(packed, 5, seed=seed) for seed in (1, 1, 2))
    taken = [rows([next(iterator) for _ in range(4)]) for iterator in (first, same, other)]
    assert taken[0] == taken[1] != taken[2]


def test_the_saved_position_continues_exactly(packed):
    straight = BatchIterator(packed, 3, seed=0)
    for _ in range(5):
        next(straight)
    saved = json.loads(json.dumps(straight.get_state()))
    resumed = BatchIterator(packed, 3, seed=0)
    resumed.set_state(saved)
    for _ in range(7):
        expected, got = next(straight), next(resumed)
        assert expected.keys() == got.keys()
        for name in expected:
            np.testing.assert_array_equal(expected[name], got[name])


def test_batches_are_host_arrays_of_the_packed_types(packed):
    batch = next(BatchIterator(packed, 2, seed=0))
    assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == {
        "ids_BS": ((2, 8), "int32"),
        "segment_ids_BS": ((2, 8), "int32"),
        "positions_BS": ((2, 8), "int32"),
        "weights_BS": ((2, 8), "float32"),
    }


def test_a_batch_without_rows_is_refused(packed):
    with pytest.raises(ValueError, match="batch_rows is 0"):
        BatchIterator(packed, 0, seed=0)
