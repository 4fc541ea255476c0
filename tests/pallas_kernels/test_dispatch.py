"""Dispatch and combine on one device against the definitions, and against sorts and scatters in what is compiled."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from pallas_kernels import aot
from pallas_kernels.dispatch import combine, gather, reference, sort_by_expert, xla

D = 5
# name -> N, C, experts, and which of the experts are chosen; several chunks of pairs in the longer ones.
CASES = {
    "one token": (1, 2, 4, range(4)),
    "one pair": (1, 1, 1, range(1)),
    "all to one": (40, 2, 8, [5]),
    "empty experts": (200, 3, 16, [1, 2, 9]),
    "some left out": (150, 2, 6, range(8)),  # 6 and 7 are none of the experts
    "all left out": (9, 2, 3, [3]),
    "whole chunks": (xla.CHUNK, 2, 4, range(4)),
    "many": (700, 4, 128, range(128)),
}


def indices_of(case: str) -> np.ndarray:
    N, C, _, chosen = CASES[case]
    return np.random.default_rng(len(case)).choice(list(chosen), (N, C)).astype(np.int32)


def assert_sorted(indices_NC, experts):
    """Everything that sort_by_expert promises, by counting in plain Python's stable sort."""
    order_P, inverse_NC, sizes_E = (np.asarray(a) for a in sort_by_expert(indices_NC, experts))
    expert_P = indices_NC.reshape(-1)
    P = expert_P.size
    expected = [p for p in sorted(range(P), key=lambda p: expert_P[p]) if expert_P[p] < experts]
    np.testing.assert_array_equal(order_P, expected + [P] * (P - len(expected)))
    np.testing.assert_array_equal(sizes_E, [np.sum(expert_P == e) for e in range(experts)])
    assert sizes_E.sum() == len(expected)
    np.testing.assert_array_equal(inverse_NC.reshape(-1)[expected], range(len(expected)))
    assert np.all(inverse_NC[indices_NC >= experts] == P)
    assert order_P.dtype == inverse_NC.dtype == sizes_E.dtype == np.int32


@pytest.mark.parametrize("case", CASES)
def test_sort_is_stable_and_exact(case):
    assert_sorted(indices_of(case), CASES[case][2])
    ours, theirs = (
        sort_by_expert(indices_of(case), CASES[case][2]),
        reference.sort_by_expert(indices_of(case), CASES[case][2]),
    )
    for found, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(found, expected)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_sort_of_anything(data):
    # Few shapes: each is a compilation.
    N, C, experts = data.draw(st.sampled_from([(1, 1, 1), (3, 2, 4), (67, 2, 3), (100, 3, 7)]))
    indices = data.draw(st.lists(st.integers(0, experts), min_size=N * C, max_size=N * C))
    assert_sorted(np.asarray(indices, np.int32).reshape(N, C), experts)


def test_search_is_the_last_at_most():
    for M in (1, 2, xla.FAN, xla.FAN + 1, xla.FAN**2, xla.FAN**2 + 1, 3 * xla.FAN**2):
        begins = np.sort(np.random.default_rng(M).integers(0, 2 * M, M)).astype(np.int32)
        begins[0] = 0
        values = np.arange(2 * M + 1, dtype=np.int32)
        found = jax.jit(xla.search)(begins, values)
        np.testing.assert_array_equal(found, np.searchsorted(begins, values, side="right") - 1)


def by_numpy(x_ND, weights_NC, scale_ED, ct_ND, indices_NC, experts):
    """Output and gradients of the mixture of expert e = scale by scale_ED[e] then square, pair by pair in float64."""
    x_ND, weights_NC, scale_ED, ct_ND = (np.asarray(a, np.float64) for a in (x_ND, weights_NC, scale_ED, ct_ND))
    out_ND, dx_ND, dweights_NC, dscale_ED = (np.zeros_like(a) for a in (x_ND, x_ND, weights_NC, scale_ED))
    for n, c in np.ndindex(indices_NC.shape):
        e = indices_NC[n, c]
        if e < experts:
            row, weight = x_ND[n] * scale_ED[e], weights_NC[n, c]
            out_ND[n] += weight * row**2
            dweights_NC[n, c] = ct_ND[n] @ row**2
            dx_ND[n] += ct_ND[n] * weight * 2 * row * scale_ED[e]
            dscale_ED[e] += ct_ND[n] * weight * 2 * row * x_ND[n]
    return out_ND, dx_ND, dweights_NC, dscale_ED


def mixture(x_ND, weights_NC, scale_ED, indices_NC, ops):
    """The same through the three functions of `ops`."""
    sort, take, put = ops
    order_P, inverse_NC, sizes_E = sort(indices_NC, len(scale_ED))
    ends_E = jnp.cumsum(sizes_E)
    # A mask instead of scale_ED[expert]: the only scatters that the compiled text could have are the dispatch's own.
    row_P1 = jnp.arange(len(order_P))[:, None]
    member_PE = ((row_P1 >= ends_E - sizes_E) & (row_P1 < ends_E)).astype(x_ND.dtype)
    scale_PD = jnp.einsum("PE,ED->PD", member_PE, scale_ED, precision="highest")
    return put(jnp.square(take(x_ND, order_P, inverse_NC) * scale_PD), weights_NC, order_P, inverse_NC)


OURS = sort_by_expert, gather, combine
DEFINITION = reference.sort_by_expert, reference.gather, reference.combine


def arrays_of(case):
    N, C, experts, _ = CASES[case]
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (N, D), (N, C), (experts, D), (N, D)
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(ops, x_ND, weights_NC, scale_ED, ct_ND, indices_NC):
    out, pull = jax.vjp(lambda *a: mixture(*a, indices_NC, ops), x_ND, weights_NC, scale_ED)
    return out, *pull(ct_ND)


@pytest.mark.parametrize(("case", "ops"), [*((case, OURS) for case in CASES), ("some left out", DEFINITION)])
def test_values_and_gradients(case, ops):
    arrays = *arrays_of(case), indices_of(case)
    expected = by_numpy(*arrays, CASES[case][2])
    for ours, theirs in zip(value_and_gradients(ops, *arrays), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * max(np.abs(theirs).max(), 1e-30))


def test_gradients_are_differences():
    indices_NC = indices_of("one token").repeat(3, 0)
    keys = jax.random.split(jax.random.key(1), 3)
    arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, [(3, D), (3, 2), (4, D)], strict=True)]
    check_grads(jax.jit(lambda *a: mixture(*a, indices_NC, OURS)), arrays, order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


def test_bfloat16_is_added_in_float32():
    """256 + 1 eight times: added in bfloat16 the ones would vanish."""
    rows_PD = jnp.asarray([[256.0]] + [[1.0]] * 8, jnp.bfloat16)
    order_P, inverse_NC, _ = sort_by_expert(jnp.arange(9)[None], 9)
    assert combine(rows_PD, jnp.ones((1, 9)), order_P, inverse_NC) == 264
    _, pull = jax.vjp(lambda x: gather(x, order_P, inverse_NC), jnp.zeros((1, 1), jnp.bfloat16))
    assert pull(rows_PD)[0] == 264


def compiled_text(ops):
    return value_and_gradients.lower(ops, *arrays_of("many"), indices_of("many")).compile().as_text()


def test_no_scatter_and_no_sort():
    pattern = r"scatter\(| sort\("
    assert not re.findall(pattern, compiled_text(OURS))
    assert re.findall(pattern, compiled_text(DEFINITION))  # the pattern finds them where they are


def test_memory_is_linear_in_pairs():
    """Per pair, on a GPU: a few numbers, where its rows of North Mini Code are 4096 bytes."""
    needs_compiler("h100")
    for N in (2048, 16384):
        indices = jax.ShapeDtypeStruct((N, 8), jnp.int32)
        compiled = aot.compile_for("h100", lambda indices: sort_by_expert(indices, 128), indices)
        assert compiled.memory_analysis().temp_size_in_bytes < 64 * N * 8


def test_equal_logits_go_to_the_lowest_expert():
    """What moe.route says of ties, and rests on jax.lax.top_k for."""
    logits_NE = jnp.asarray(np.random.default_rng(0).integers(0, 3, (500, 16)), jnp.float32)
    _, indices_NC = jax.jit(lambda logits: jax.lax.top_k(logits, 4))(logits_NE)
    expected = [sorted(range(16), key=lambda e: -row[e])[:4] for row in np.asarray(logits_NE)]
    np.testing.assert_array_equal(indices_NC, expected)


def test_refuses_by_name():
    with pytest.raises(ValueError, match="pass int32"):
        sort_by_expert(jnp.zeros((2, 2)), 3)
    with pytest.raises(ValueError, match="one at least"):
        sort_by_expert(jnp.zeros((2, 2), jnp.int32), 0)
    order_P, inverse_NC, _ = sort_by_expert(jnp.zeros((2, 2), jnp.int32), 3)
    with pytest.raises(ValueError, match="gather: rows"):
        gather(jnp.zeros((3, 1)), order_P, inverse_NC)
    with pytest.raises(ValueError, match="combine: rows"):
        combine(jnp.zeros((3, 1)), jnp.zeros((2, 2)), order_P, inverse_NC)
