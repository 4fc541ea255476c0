"""Agreement with recorded outputs of the reference implementation, for every seed that the oracle folder holds."""

import dataclasses
import functools
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle import SEEDS, recording

from north_jax.model import Decoder
from north_jax.weights import from_tensors, load, parity, read_tensors

CASES = [pytest.param(seed, id=seed.name) for seed in SEEDS]
LENGTHS = [
    pytest.param(seed, int(m.group(1)), id=f"{seed.name}-len{m.group(1)}")
    for seed in SEEDS
    for name in recording(seed)
    if (m := re.fullmatch(r"len(\d+)/input_ids", name))
]


@functools.cache
def model_of(seed, moe="dense"):
    return load(seed, moe=moe)


def check(differences):
    differences = list(differences)
    assert differences
    assert [d for d in differences if not d.ok] == []
    return {d.name for d in differences}


@pytest.mark.parametrize(("seed", "n"), LENGTHS)
def test_sequence(seed, n):
    arrays = recording(seed)
    names = check(parity.sequence(model_of(seed), arrays, n))
    # Hidden states, router choices and the wider window are compared where they were recorded.
    recorded = {key for key in arrays if key.startswith(f"len{n}/") and not key.endswith("input_ids")}
    assert names == recorded


@pytest.mark.parametrize("seed", CASES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(seed, side):
    check(parity.padded(model_of(seed), recording(seed), side))


@pytest.mark.parametrize("seed", CASES)
@pytest.mark.parametrize("prefill", parity.PREFILLS)
def test_cached_decoding(seed, prefill):
    arrays = recording(seed)
    longest = max(int(key.split("/")[0][3:]) for key in arrays if key.startswith("len"))
    if prefill >= longest:
        pytest.skip(f"the longest recorded sequence has {longest} tokens")
    check([parity.cached(model_of(seed), arrays, longest, prefill)])


@pytest.mark.parametrize("seed", CASES)
@pytest.mark.parametrize("moe", ["dense", "grouped"])
def test_gradients(seed, moe):
    names = check(parity.gradients(model_of(seed, moe), recording(seed)))
    assert sum(name.startswith("grad/model.") for name in names) == 11


@pytest.mark.parametrize("seed", CASES)
def test_greedy_continuation(seed):
    check(parity.greedy(model_of(seed), recording(seed)))


@pytest.mark.parametrize("seed", CASES)
def test_released_spelling_gives_the_same_logits(seed, tmp_path):
    shutil.copy(seed / "config.released_style.json", tmp_path / "config.json")
    shutil.copy(seed / "model.safetensors", tmp_path)
    released = load(tmp_path, moe="grouped")
    check(parity.sequence(released, recording(seed), 9))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rms_norm_eps": None},
        {"prefix_dense_sliding_window_pattern": 2},
        {"norm_topk_prob": True},
        {"expert_selection_fn": "softmax"},
        {"window_inclusive": True},
        {"logit_scale": 1.0},
        {"rope_theta": 10000.0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_equation_is_seen(wrong):
    model = model_of(SEEDS[0])
    config = dataclasses.replace(model.config, **wrong)
    broken = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    from_tensors(broken, read_tensors(SEEDS[0]))
    arrays = recording(SEEDS[0])
    forward = nnx.jit(lambda model, ids_BS: model(ids_BS))
    logits = np.asarray(forward(broken, jnp.asarray(arrays["len24/input_ids"])[None]))[0]
    assert np.abs(logits - arrays["len24/logits"]).max() > 0.1
