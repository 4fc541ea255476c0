"""Every backend of the grouped product against the definition, values and gradients, on the named shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import BACKENDS, grouped_matmul
from pallas_kernels.grouped_matmul.shapes import NORTH, TINY


def sizes_of(case: str, P: int, E: int) -> np.ndarray:
    if case == "one group holds all":
        return np.bincount([E - 1], minlength=E) * P
    if case == "rows left over":
        return np.full(E, P // (2 * E))
    return np.bincount(np.random.default_rng(0).integers(0, E, P), minlength=E)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("case", ["random", "one group holds all", "rows left over"])
@pytest.mark.parametrize("shape", TINY.values(), ids=TINY.keys())
def test_backend_equals_reference(backend, case, shape):
    x = jax.random.normal(jax.random.key(0), (shape.P, shape.D))
    w = jax.random.normal(jax.random.key(1), (shape.E, shape.D, shape.F))
    ct = jax.random.normal(jax.random.key(2), (shape.P, shape.F))
    sizes = jnp.asarray(sizes_of(case, shape.P, shape.E), jnp.int32)
    results = []
    for name in (backend, "reference"):
        out, pull = jax.vjp(lambda x, w, name=name: grouped_matmul(x, w, sizes, backend=name), x, w)
        results.append((out, *pull(ct)))
    for ours, expected in zip(*results, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-5)


def test_reference_is_one_product_per_group():
    x, w = np.arange(12.0).reshape(4, 3), np.arange(12.0).reshape(2, 3, 2)
    out = grouped_matmul(jnp.asarray(x), jnp.asarray(w), jnp.asarray([1, 3]), backend="reference")
    np.testing.assert_allclose(out, np.concatenate([x[:1] @ w[0], x[1:] @ w[1]]))


def test_north_shapes_count_pairs():
    assert NORTH["train_8k_up"].P == 8192 * 8
    assert (NORTH["train_8k_up"].D, NORTH["train_8k_up"].F) == (NORTH["train_8k_down"].F, NORTH["train_8k_down"].D)


def test_refuses_by_name():
    x, w, sizes = jnp.ones((4, 3)), jnp.ones((2, 3, 5)), jnp.asarray([2, 2])
    with pytest.raises(ValueError, match="backend 'magic' is not known"):
        grouped_matmul(x, w, sizes, backend="magic")
    with pytest.raises(ValueError, match="do not fit"):
        grouped_matmul(jnp.ones((4, 4)), w, sizes)
    with pytest.raises(ValueError, match="whole numbers of rows"):
        grouped_matmul(x, w, sizes.astype(jnp.float32))
