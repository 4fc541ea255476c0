"""The backends of the grouped products against one product a group in float64, values and gradients."""

import contextlib
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul import BACKENDS, gated_grouped_matmul, grouped_matmul, rule, tpu
from pallas_kernels.grouped_matmul.shapes import NORTH, TINY, Shape
from pallas_kernels.grouped_matmul.tiles import CHIPS

# Hopper's take bfloat16 only: test_grouped_matmul_gpu.py.
FLOAT32 = [name for name in BACKENDS if name not in ("gpu", *CHIPS)]  # a chip is "tpu" with tiles
FUNCTIONS = {"plain": grouped_matmul, "gated": gated_grouped_matmul}
# Two blocks of columns, three tiles, a last tile that is not full; and fewer rows than the kernels' smallest unit.
SHAPES = {"blocks": Shape(P=76, D=32, F=256, E=5), "one_row": Shape(P=1, D=8, F=16, E=3), **TINY}
SMALL_TILES = tpu.Tiles(rows=32, columns=128, piece=16, depth=32)


def groups(sizes, P):
    ends = np.cumsum(sizes)
    return [slice(min(end - size, P), min(end, P)) for size, end in zip(sizes, ends, strict=True)]


def expected_plain(sizes, ct, x, w):
    out, dx, dw = np.zeros(ct.shape), np.zeros(x.shape), np.zeros(w.shape)
    for e, rows in enumerate(groups(sizes, len(x))):
        out[rows], dx[rows], dw[e] = x[rows] @ w[e], ct[rows] @ w[e].T, x[rows].T @ ct[rows]
    return out, dx, dw


def expected_gated(sizes, ct, x, gate, up):
    a, _, _ = expected_plain(sizes, ct, x, gate)
    b, _, _ = expected_plain(sizes, ct, x, up)
    s = 1 / (1 + np.exp(-a))
    _, dx_a, dgate = expected_plain(sizes, ct * b * s * (1 + a * (1 - s)), x, gate)
    _, dx_b, dup = expected_plain(sizes, ct * a * s, x, up)
    return a * s * b, dx_a + dx_b, dgate, dup


EXPECTED = {"plain": expected_plain, "gated": expected_gated}


def inputs(name, shape, dtype=jnp.float32):
    """ct_PF, x_PD and one or two w_EDF."""
    dims = [(shape.P, shape.F), (shape.P, shape.D)] + [(shape.E, shape.D, shape.F)] * (2 if name == "gated" else 1)
    return [jax.random.normal(jax.random.key(i), d).astype(dtype) for i, d in enumerate(dims)]


@functools.cache
def value_and_gradients(name, backend, tiles=None):
    def run(sizes, ct, *arrays):
        if tiles is None:
            function = functools.partial(FUNCTIONS[name], backend=backend)
        else:
            function = getattr(rule, FUNCTIONS[name].__name__)(tpu, tiles=tiles)
        out, pull = jax.vjp(lambda *arrays: function(*arrays, sizes), *arrays)
        return out, *pull(ct)

    # Traced, so interpreted, inside the context; the same program then serves all sizes.
    run = jax.jit(run)

    def call(*arguments):
        with pltpu.force_tpu_interpret_mode() if backend == "tpu" else contextlib.nullcontext():
            return run(*arguments)

    return call


def float64(arrays):
    return [np.asarray(x.astype(jnp.float32), np.float64) for x in arrays]


def errors(ours, expected):
    """max |error| / max |expected| of each array; the absolute error where all of it should be zero."""
    return [float(np.abs(o - e).max() / (np.abs(e).max() or 1)) for o, e in zip(float64(ours), expected, strict=True)]


def sizes_of(case, P, E):
    if case == "one group holds all":
        return np.bincount([E - 1], minlength=E) * P
    if case == "rows left over":
        return np.full(E, P // (2 * E))
    if case == "no rows at all":
        return np.zeros(E, np.int64)
    return np.bincount(np.random.default_rng(0).integers(0, E, P), minlength=E)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("backend", FLOAT32)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_backends_equal_float64(name, backend, shape):
    arrays = inputs(name, shape)
    tiles = SMALL_TILES if backend == "tpu" else None
    for case in ("random", "one group holds all", "rows left over", "no rows at all"):
        sizes = sizes_of(case, shape.P, shape.E)
        ours = value_and_gradients(name, backend, tiles)(jnp.asarray(sizes, jnp.int32), *arrays)
        expected = EXPECTED[name](sizes, *float64(arrays))
        assert [(o.shape, o.dtype) for o in ours] == [(e.shape, jnp.float32) for e in expected]
        assert max(errors(ours, expected)) < 2e-6, (case, errors(ours, expected))


@pytest.mark.parametrize("name", FUNCTIONS)
@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(cuts=st.lists(st.integers(0, 76), min_size=5, max_size=5))
def test_kernels_on_any_sizes(name, cuts):
    shape = SHAPES["blocks"]
    sizes = np.diff(np.sort([0, *cuts]))  # Groups without rows where cuts coincide; rows left over past the last.
    arrays = inputs(name, shape)
    ours = value_and_gradients(name, "tpu", SMALL_TILES)(jnp.asarray(sizes, jnp.int32), *arrays)
    assert max(errors(ours, EXPECTED[name](sizes, *float64(arrays)))) < 2e-6


@pytest.mark.parametrize("name", FUNCTIONS)
def test_default_tiles_through_the_public_name(name):
    shape = TINY["train_up"]
    sizes, arrays = sizes_of("random", shape.P, shape.E), inputs(name, shape)
    ours = value_and_gradients(name, "tpu")(jnp.asarray(sizes, jnp.int32), *arrays)
    assert max(errors(ours, EXPECTED[name](sizes, *float64(arrays)))) < 2e-6


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bfloat16_errs_no_more_than_xla(name):
    shape = Shape(P=150, D=64, F=48, E=4)
    sizes, arrays = sizes_of("random", shape.P, shape.E), inputs(name, shape, jnp.bfloat16)
    expected = EXPECTED[name](sizes, *float64(arrays))
    norms = {}
    for backend, tiles in (("tpu", SMALL_TILES), ("xla", None)):
        results = value_and_gradients(name, backend, tiles)(jnp.asarray(sizes, jnp.int32), *arrays)
        assert all(x.dtype == jnp.bfloat16 for x in results)
        pairs = zip(float64(results), expected, strict=True)
        norms[backend] = [np.linalg.norm(o - e) / np.linalg.norm(e) for o, e in pairs]
    assert all(ours <= 1.001 * xla for ours, xla in zip(norms["tpu"], norms["xla"], strict=True)), norms


def test_gradients_are_finite_differences():
    shape, sizes, step = Shape(P=20, D=8, F=8, E=3), jnp.asarray([7, 0, 11], jnp.int32), 1e-2
    ct, *arrays = inputs("gated", shape)
    run = value_and_gradients("gated", "tpu", SMALL_TILES)
    _, *gradients = run(sizes, ct, *arrays)
    for i, gradient in enumerate(gradients):
        direction = jax.random.normal(jax.random.key(9 + i), gradient.shape)
        ends = []
        for sign in (1, -1):
            moved = [x + sign * step * direction if i == j else x for j, x in enumerate(arrays)]
            ends.append(float(jnp.vdot(ct, run(sizes, ct, *moved)[0])))
        np.testing.assert_allclose((ends[0] - ends[1]) / (2 * step), jnp.vdot(gradient, direction), rtol=5e-3)


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
    with pytest.raises(ValueError, match=r"gates .* and ups .* do not fit"):
        gated_grouped_matmul(x, w, w[:, :, :4], sizes)
    with pytest.raises(ValueError, match="all bfloat16 or all float32"):
        grouped_matmul(x.astype(jnp.bfloat16), w, sizes, backend="tpu")
