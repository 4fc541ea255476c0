"""What `tools/bench.py train` holds its contestants to, on a tiny model; the times themselves are for the command."""

import pathlib
import sys

import numpy as np
import pytest
from train_tiny import tiny_model

from north_jax.weights import hf

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tools"))

import bench_train as bench


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "model"
    hf.save(path, tiny_model(), version="0", step=0)
    return path


def test_transformers_has_our_losses_and_we_compile_no_more(folder):
    ids_BS = bench.random_batch(48, 4, 24)
    times = bench.race(folder, ids_BS, rounds=2, steps=2, theirs=("eager", "grouped_mm"))
    assert set(times) == {"ours", "eager", "grouped_mm"}
    assert all(len(each) == 2 and min(map(min, each)) > 0 for each in times.values())


def test_compilations_are_counted_and_transfers_refused(folder):
    ours = bench.Ours(folder, bench.random_batch(48, 4, 24))
    first = ours.steps(2)
    compiled = ours.compiled
    assert compiled > 0 and ours.steps(2)[-1] < first[0]
    assert ours.compiled == compiled
    batch = ours.batch
    ours.batch = {name: np.asarray(x) for name, x in batch.items()}
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        ours.steps(1)
    ours.batch = {name: x[:2] for name, x in batch.items()}
    ours.steps(1)
    assert ours.compiled > compiled


def test_other_losses_are_refused():
    bench.check_losses({"ours": [3.5, 3.25], "eager": [3.5, 3.250009]})
    with pytest.raises(RuntimeError, match=r"the losses of eager, .* are not those of ours"):
        bench.check_losses({"ours": [3.5, 3.25], "eager": [3.5, 3.25002]})
