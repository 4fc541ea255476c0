"""The experts' load: counted, measured, and said aloud when it goes wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from north_jax.model.moe import expert_counts
from north_jax.parallel import make_mesh, spec
from north_jax.train.expert_load import load_alarm, load_metrics
from north_jax.train.metrics import METRICS

E = 8


def test_counts_are_of_counted_tokens_on_a_mesh_too():
    indices_BSC = jax.random.randint(jax.random.key(0), (8, 6, 2), 0, E)
    counted_BS = jax.random.bernoulli(jax.random.key(1), 0.7, (8, 6))
    expected = np.bincount(np.ravel(np.asarray(indices_BSC)[np.asarray(counted_BS)]), minlength=E)
    np.testing.assert_array_equal(expert_counts(indices_BSC, counted_BS, E), expected)
    np.testing.assert_array_equal(expert_counts(indices_BSC.reshape(48, 2), counted_BS.reshape(48), E), expected)
    mesh = make_mesh(data=2, expert=2, context=2)
    rows = [NamedSharding(mesh, spec(("batch", "sequence", None)[:n])) for n in (3, 2)]
    placed = jax.device_put((indices_BSC, counted_BS.astype(jnp.int32)), tuple(rows))
    text = jax.jit(expert_counts, static_argnums=2).lower(*placed, E).compile().as_text()
    assert "all-gather" not in text and "all-reduce" in text
    np.testing.assert_array_equal(jax.jit(expert_counts, static_argnums=2)(*placed, E), expected)


@pytest.mark.parametrize(
    "counts, most, entropy, dead",
    [
        ([[5] * E, [3] * E], 1.0, 1.0, 0.0),
        ([[5] * E, [8, 8] + [0] * (E - 2)], 4.0, (1 + 1 / 3) / 2, 6 / 16),
        ([[0] * E, [16] + [0] * (E - 1)], 8.0, 0.5, 7 / 16),
    ],
)
def test_metrics_are_as_defined(counts, most, entropy, dead):
    found = jax.jit(load_metrics)(jnp.asarray(counts))
    assert found.keys() <= METRICS.keys()
    expected = {"expert_load_max": most, "expert_load_entropy": entropy, "expert_dead_share": dead}
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_the_alarm_names_the_layer_and_the_expert():
    even = [100] * E
    assert load_alarm([even, even], chosen=2) is None
    text = load_alarm([even, [80, 240, *[80] * (E - 2)]], chosen=2, first_layer=1)
    assert text.startswith("expert load: expert 1 of layer 2 is chosen by 60% of the tokens (even: 25.0%; layers")
    assert "no token" not in text
    text = load_alarm([[133] * (E - 2) + [0, 0], even], chosen=2, first_layer=1)
    assert text.startswith("expert load: 25% of the experts of layer 1 have no token") and "chosen by" not in text


def test_few_tokens_raise_no_alarm_of_dead_experts():
    assert load_alarm([[3] * (E - 2) + [0, 0]], chosen=2) is None
