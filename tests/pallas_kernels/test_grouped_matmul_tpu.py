"""The TPU kernels of the grouped products: what a visit does, races, and lowering and compiling for real chips."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import needs_compiler
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import aot
from pallas_kernels.grouped_matmul import gated_grouped_matmul, grouped_matmul, tpu
from pallas_kernels.grouped_matmul.schedule import computed_rows, schedule, unit_rows
from pallas_kernels.grouped_matmul.shapes import NORTH
from pallas_kernels.grouped_matmul.tiles import CHIPS, TILES, cut, tuned

TPUS = [chip.name for chip in aot.CHIPS.values() if chip.platform == "tpu"]


@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
@hypothesis.given(sizes=st.lists(st.integers(0, 40), min_size=6, max_size=6), empty=st.booleans())
def test_each_row_is_visited_once_under_its_group(sizes, empty):
    P, rows = 120, 32
    steps = [np.asarray(x) for x in schedule(jnp.asarray(sizes), P, rows, empty=empty)]
    group, tile = steps[:2]
    assert len(group) <= 4 + 6
    seen = np.full(P, -1)
    for e, t, start, end in zip(*steps, strict=True):
        assert 0 <= start <= end <= rows
        assert np.all(seen[t * rows + start : t * rows + end] == -1)
        seen[t * rows + start : t * rows + end] = e
    expected = np.append(np.repeat(np.arange(6), sizes), np.full(P, -1))[:P]
    np.testing.assert_array_equal(seen, expected)
    # A tile, or a sum of a group, stays in VMEM only while its visits are consecutive.
    assert np.all(np.diff(group) >= 0) and np.all(np.diff(tile) >= 0) and tile.max() < 4
    assert set(group) == set(range(6)) if empty else set(tile) == set(range(4))


@pytest.mark.parametrize("dtype", tpu.TILES, ids=str)
@pytest.mark.parametrize("P", [NORTH["train_8k_up"].P, 8 * NORTH["train_8k_up"].P])
@pytest.mark.parametrize("routing", ["uniform", "skewed"])
@pytest.mark.parametrize("empty", [False, True], ids=["by_matrices", "by_rows"])
def test_little_is_multiplied_twice(P, dtype, routing, empty):
    """Visits' rows; that the products of a visit have no more is test_each_row_of_a_visit_is_in_one_piece."""
    random, E = np.random.default_rng(0), NORTH["train_8k_up"].E
    shares = np.full(E, 1 / E) if routing == "uniform" else random.dirichlet(np.ones(E))
    sizes = jnp.asarray(random.multinomial(P, shares))
    _, _, low, high = schedule(sizes, P, tpu.TILES[dtype].rows, empty=empty)
    ratio = int(computed_rows(low, high, unit_rows(dtype)).sum()) / P
    assert 1 < ratio <= 1 + unit_rows(dtype) * (E - 1) / P < 1.05


def pieces(low, high, piece, split):
    """(start, size, first) of each piece of a visit of 512 rows in units of 16."""
    done = []

    def note(*numbers):
        done.append(tuple(map(int, numbers)))

    with jax.disable_jit():
        tpu._each_piece(jnp.int32(low), jnp.int32(high), 512, 16, piece, split, note)
    return done


@pytest.mark.parametrize("split", [True, False])
def test_each_row_of_a_visit_is_in_one_piece(split):
    for low, high in ((0, 0), (0, 512), (5, 6), (15, 17), (3, 509), (128, 400), (470, 505), (345, 510)):
        done = pieces(low, high, 128, split)
        # What a kernel keeps of a piece: its rows from `first`, and from none before `low`, to `high`.
        rows = [r for start, size, first in done for r in range(max(start, first, low), min(start + size, high))]
        assert rows == list(range(low, high))
        assert all(start >= 0 and start + size <= 512 and start % 16 == 0 for start, size, _ in done)
        assert sum(size for _, size, _ in done) == computed_rows(jnp.int32(low), jnp.int32(high), 16)
        if not split:
            assert len(done) <= (high - low) // 128 + 2


@functools.cache
def kernels(P, D, F, E, dtype, tiles=None):
    """name: (function, arguments) of every kernel of one shape."""
    described = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    x, y, w, sizes = described((P, D)), described((P, F)), described((E, D, F)), jax.ShapeDtypeStruct((E,), jnp.int32)

    def with_tiles(function, **options):
        return functools.partial(function, tiles=tiles, **options)

    return {
        "gmm": (with_tiles(tpu.gmm), (x, w, sizes)),
        "gmm_transposed": (with_tiles(tpu.gmm, transposed=True), (y, w, sizes)),
        "tgmm": (with_tiles(tpu.tgmm), (x, y, sizes)),
        "gated": (with_tiles(tpu.gated, save=False), (x, w, w, sizes)),
        "gated_saving": (with_tiles(tpu.gated, save=True), (x, w, w, sizes)),
        "gated_gradients": (with_tiles(tpu.gated_gradients), (x, w, w, sizes, y, y, y)),
    }


def races_found():
    # Private: there is no public verdict, in 0.10.2 or in 0.11.2.
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return interpret_pallas_call.races.races_found


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
@pytest.mark.parametrize("name", kernels(8, 8, 8, 1, jnp.bfloat16))
def test_no_races_and_nothing_read_unwritten(name, mode):
    function, specs = kernels(60, 8, 256, 4, jnp.float32, tpu.Tiles(rows=16, columns=128, piece=8, depth=16))[name]
    sizes = jnp.asarray([21, 0, 5, 20], jnp.int32)
    keys = iter(jax.random.split(jax.random.key(0), len(specs)))
    arrays = [sizes if s.dtype == jnp.int32 else jax.random.normal(next(keys), s.shape) for s in specs]
    # Rows past the last group belong to none, whatever they hold.
    arrays = [x.at[46:].set(jnp.nan) if x.ndim == 2 else x for x in arrays]
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode, uninitialized_memory="nan")
    try:
        with pltpu.force_tpu_interpret_mode(params):
            results = jax.block_until_ready(jax.jit(function)(*arrays))
        assert not races_found()
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(results))


@pytest.mark.parametrize("dtype", tpu.TILES, ids=str)
@pytest.mark.parametrize("shape", NORTH.values(), ids=NORTH.keys())
def test_lowers_for_tpu(shape, dtype):
    for name, (function, specs) in kernels(shape.P, shape.D, shape.F, shape.E, dtype).items():
        module = jax.export.export(jax.jit(function), platforms=["tpu"])(*specs).mlir_module()
        assert module.count("@tpu_custom_call(") == (2 if name == "gated_gradients" else 1)


def test_auto_is_settled_by_the_platform_it_is_lowered_for():
    specs = kernels(512, 128, 128, 4, jnp.bfloat16)["gated"][1]

    def loss(x, gate, up, sizes):
        hidden = gated_grouped_matmul(x, gate, up, sizes, backend="auto")
        return grouped_matmul(hidden, up, sizes, backend="auto").astype(jnp.float32).sum()

    for platform, calls in (("tpu", 6), ("cpu", 0)):
        exported = jax.export.export(jax.jit(jax.value_and_grad(loss, (0, 1, 2))), platforms=[platform])(*specs)
        assert exported.mlir_module().count("@tpu_custom_call(") == calls


def experts(x_PD, gate_EDF, up_EDF, down_EFD, sizes_E):
    hidden_PF = gated_grouped_matmul(x_PD, gate_EDF, up_EDF, sizes_E, backend="tpu")
    return grouped_matmul(hidden_PF, down_EFD, sizes_E, backend="tpu")


def experts_and_gradients(sizes_E, d_PD, *arrays):
    out_PD, pull = jax.vjp(lambda *arrays: experts(*arrays, sizes_E), *arrays)
    return out_PD, *pull(d_PD)


@pytest.mark.parametrize("tokens", [8192, 65536])
@pytest.mark.parametrize("chip", TPUS)
def test_north_compiles_forward_and_backward(chip, tokens):
    needs_compiler(chip)
    shape = NORTH["train_8k_up"]
    P, D, F, E = 8 * tokens, shape.D, shape.F, shape.E
    described = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    x, w, down = described((P, D)), described((E, D, F)), described((E, F, D))
    sizes = jax.ShapeDtypeStruct((E,), jnp.int32)
    compiled = aot.compile_for(chip, experts_and_gradients, sizes, x, x, w, w, down)
    # Saved are a, b and hidden; the backward adds the gradient in hidden. Nothing grows with the experts.
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * P * F * 2 + 2**25
    assert compiled.cost_analysis()["flops"] < 1.01 * 3 * 3 * 2 * P * D * F
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 6


@pytest.mark.parametrize("chip", TPUS)
def test_a_tile_too_large_does_not_compile(chip):
    needs_compiler(chip)
    function, specs = kernels(
        65536, 2048, 768, 128, jnp.bfloat16, tpu.Tiles(rows=8192, columns=2048, piece=128, depth=256)
    )["gmm"]
    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        aot.compile_for(chip, function, *specs)


@pytest.mark.parametrize("chip", CHIPS)
def test_every_core_of_a_chip_has_blocks_of_columns(chip):
    tiles = tuned(chip)
    for width in (NORTH["train_8k_up"].F, NORTH["train_8k_up"].D):
        _, _, columns, blocks = cut(512, jnp.bfloat16, width, tiles)
        assert blocks % aot.CHIPS[chip].cores == 0 and columns * blocks == width


def test_tiles_are_those_of_the_chip_that_is_named():
    assert tuned("v5p") != TILES[jnp.dtype(jnp.bfloat16)]
    for dtype, differ in ((jnp.bfloat16, True), (jnp.float32, False)):  # ranked in bfloat16 only
        specs = kernels(512, 256, 256, 4, dtype)["gmm"][1]
        jitted = (jax.jit(functools.partial(grouped_matmul, backend=backend)) for backend in ("tpu", "v5p"))
        texts = [jax.export.export(function, platforms=["tpu"])(*specs).mlir_module() for function in jitted]
        assert (texts[0] != texts[1]) == differ
