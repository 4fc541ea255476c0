"""The experts' load: measured, and said aloud when it collapses."""

import jax
import jax.numpy as jnp
import pytest
from train_tiny import tiny_model

from north_jax.train.expert_load import ENOUGH, STEPS, LoadAlarm, load_metrics
from north_jax.train.metrics import METRICS

E = 8
NONE = [0] * E  # a dense layer


@pytest.mark.parametrize(
    "counts, most, entropy, dead, used, layer",
    [
        ([[5] * E, [3] * E], 1.0, 1.0, 0.0, 8.0, 0),
        ([NONE, [5] * E, [8, 8] + [0] * (E - 2)], 4.0, (1 + 1 / 3) / 2, 6 / 16, 2.0, 2),
        ([NONE, [16] + [0] * (E - 1)], 8.0, 0.0, 7 / 8, 1.0, 1),
        ([NONE, NONE], 1.0, 1.0, 0.0, 8.0, 0),
    ],
)
def test_metrics_are_as_defined(counts, most, entropy, dead, used, layer):
    found = jax.jit(load_metrics)(jnp.asarray(counts))
    assert found.keys() <= METRICS.keys()
    expected = {
        "expert_load_max": most,
        "expert_load_entropy": entropy,
        "expert_dead_share": dead,
        "expert_used_min": used,
        "expert_used_layer": layer,
    }
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected, rel=1e-6, abs=1e-6)


# The tiny model: 2 of 4 experts, collapsed below 2 * 2^(1/4) = 2.38.
COLLAPSED = {"expert_used_min": 2.3, "expert_used_layer": 1.0, "tokens": 4 * ENOUGH}
HEALTHY = COLLAPSED | {"expert_used_min": 2.5}


def sentences(*stretches):
    alarm = LoadAlarm(tiny_model().config)
    steps = [values for values, count in stretches for _ in range(count)]
    return {step: said for step, values in enumerate(steps, 1) if (said := alarm(step, values))}


def test_the_alarm_names_step_and_layer_and_says_it_once_a_stretch():
    said = sentences((HEALTHY, 3), (COLLAPSED, 3 * STEPS), (HEALTHY, 1), (COLLAPSED, STEPS))
    assert list(said) == [3 + STEPS, 3 + 3 * STEPS + 1 + STEPS]
    text = said[3 + STEPS]
    assert (
        f"for {STEPS} steps: at step {3 + STEPS} the tokens use 2.3 of the 4 experts of layer 1 (each token 2)" in text
    )
    assert "\n" not in text and "metrics.jsonl" in text


def test_a_short_collapse_and_few_tokens_raise_no_alarm():
    assert not sentences((COLLAPSED, STEPS - 1), (HEALTHY, 1), (COLLAPSED, STEPS - 1))
    assert not sentences((HEALTHY, 5 * STEPS))
    few = COLLAPSED | {"tokens": 2 * ENOUGH - 1}
    assert not sentences((few, 5 * STEPS))
