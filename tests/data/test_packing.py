import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from north_jax.data import Example, best_fit, pack


def naive_best_fit(lengths, capacity):
    bins, rooms = [], []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [b for b in range(len(bins)) if rooms[b] >= lengths[index]]
        if not fitting:
            bins.append([])
            rooms.append(capacity)
            fitting = [len(bins) - 1]
        chosen = min(fitting, key=lambda b: rooms[b])
        bins[chosen].append(index)
        rooms[chosen] -= lengths[index]
    return bins, rooms


@given(st.lists(st.integers(1, 20), max_size=60))
def test_best_fit_packs_as_the_quadratic_one_does(lengths):
    bins = best_fit(lengths, 20)
    naive, rooms = naive_best_fit(lengths, 20)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert sorted(20 - sum(lengths[i] for i in members) for members in bins) == sorted(rooms)
    assert len(bins) == len(naive)


def test_best_fit_by_hand():
    # 6 opens a row, 5 another, 4 fits the fuller (room 4), 3 the other (room 5), then 2 fits room 2.
    assert best_fit([2, 3, 4, 5, 6], 10) == [[4, 2], [3, 1, 0]]


@pytest.mark.parametrize("length", [0, 11])
def test_best_fit_refuses_what_no_bin_holds(length):
    with pytest.raises(ValueError, match=f"sequence 1 has length {length}"):
        best_fit([3, length], 10)


def examples(seed, count=50, longest=24):
    random = np.random.default_rng(seed)
    made = []
    for index in range(count):
        length = int(random.integers(2, longest + 1))
        ids = random.integers(1, 100, length).tolist()
        made.append(Example(f"e{index}", ids, [*(random.random(length - 1) + 0.1).round(3).tolist(), 1.0]))
    return made


@given(st.integers(0, 1000))
def test_every_example_is_in_the_rows_whole_and_once(seed):
    made = examples(seed)
    packed = pack(made, 24)
    found = []
    for row in range(len(packed)):
        segments = packed.segment_ids_BS[row]
        used = int((segments > 0).sum())
        assert (segments[used:] == 0).all() and (packed.ids_BS[row, used:] == 0).all()
        assert (packed.weights_BS[row, used:] == 0).all() and (packed.positions_BS[row, used:] == 0).all()
        assert set(np.diff(segments[:used])) <= {0, 1} and segments[0] == 1
        for segment in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == segment)
            assert (packed.positions_BS[row, at] == np.arange(len(at))).all()
            assert packed.weights_BS[row, at[0]] == 0
            found.append((packed.ids_BS[row, at].tolist(), packed.weights_BS[row, at[1:]].round(3).tolist()))
    assert sorted(str(f) for f in found) == sorted(
        str((e.ids, np.float32(e.weights[1:]).round(3).tolist())) for e in made
    )
    assert packed.tokens == sum(len(e.ids) for e in made)
    assert packed.fill == packed.tokens / (len(packed) * 24)


def test_a_long_example_is_refused_by_name_or_counted():
    made = [Example("short", [1, 2], [0.0, 1.0]), Example("story-7", [1] * 9, [1.0] * 9)]
    with pytest.raises(ValueError, match="example story-7 has 9 tokens, but a row holds 8"):
        pack(made, 8)
    packed = pack(made, 8, leave_out_longer=True)
    assert packed.left_out == 1 and packed.tokens == 2
    with pytest.raises(ValueError, match="no example fits a row of 1 tokens"):
        pack(made, 1, leave_out_longer=True)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (Example("odd", [1, 2, 3], [1.0]), "example odd has 3 ids but 1 weights"),
        (Example("mute", [1, 2, 3], [1.0, 0.0, 0.0]), "example mute has no token with a loss weight"),
        (Example("empty", [], []), "example empty has no token with a loss weight"),
    ],
)
def test_an_example_that_cannot_be_trained_is_refused(example, message):
    with pytest.raises(ValueError, match=message):
        pack([example], 8)
