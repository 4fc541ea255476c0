import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from train_tiny import tiny_model

from north_jax.train.optimizer import adamw, make_schedule


def test_schedules_by_hand():
    linear = [float(make_schedule(1.0, 10, warmup=4)(step)) for step in range(11)]
    np.testing.assert_allclose(linear, [0.2, 0.4, 0.6, 0.8, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0], atol=1e-6)
    cosine = make_schedule(2.0, 10, decay="cosine")
    np.testing.assert_allclose([cosine(0), cosine(5), cosine(10)], [2.0, 1.0, 0.0], atol=1e-6)
    constant = make_schedule(3.0, 0, warmup=2, decay="constant")
    np.testing.assert_allclose([constant(s) for s in (0, 1, 2, 1000)], [1, 2, 3, 3], atol=1e-6)


def test_bad_schedules_are_refused():
    with pytest.raises(ValueError, match="unknown learning-rate decay 'exponential': use linear"):
        make_schedule(1.0, 10, decay="exponential")
    with pytest.raises(ValueError, match="a warm-up of 10 steps does not end within 10 steps"):
        make_schedule(1.0, 10, warmup=10)


def test_decay_spares_the_norms_and_clipping_bounds_the_gradient():
    params = nnx.state(tiny_model(), nnx.Param)
    params = jax.tree.map(lambda x: jnp.ones_like(x), params)
    optimizer = adamw(make_schedule(0.1, 0, decay="constant"), weight_decay=0.5).transform
    still = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(still, optimizer.init(params), params)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        expected = 0.0 if "norm" in jax.tree_util.keystr(path) else -0.1 * 0.5
        np.testing.assert_allclose(update, expected, atol=1e-7)

    # The first moment after one step is (1 - b1) times the clipped gradient, whose norm is 1.
    steep = jax.tree.map(lambda x: jnp.full_like(x, 100.0), params)
    _, state = optimizer.update(steep, optimizer.init(params), params)
    (moments,) = [s.mu for s in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(s, "mu")]
    norm = np.sqrt(sum(float((m**2).sum()) for m in jax.tree.leaves(moments)))
    np.testing.assert_allclose(norm, 0.1, rtol=1e-5)
