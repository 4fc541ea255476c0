"""Paged attention: both backends against a float64 definition, what is fetched, the kernel's races, and compilers."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import needs_compiler
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import aot
from pallas_kernels.paged_attention import paged_attention, rows, tpu
from pallas_kernels.paged_attention.shapes import NORTH

TPUS = [name for name, chip in aot.CHIPS.items() if chip.platform == "tpu"]
NOWHERE = 10**6  # a page beyond every pool: interpret mode refuses to read it


def case(lengths, S=1, P=16, W=40, window=None, early=False, H=4, G=2, K=128, seed=0, dtype=np.float32):
    """The last S tokens of rows of these lengths ask; pools have NaN wherever no query may look.

    Tables begin, as the sampler's do, at the first page that a sliding row needs, or `early`, as they do some steps
    later, with the row. Length 0: an unused row.
    """
    rng = np.random.default_rng(seed)
    B = len(lengths)
    position_BS = np.stack([np.arange(n - S, n) for n in lengths])  # negative: padding
    first_B = [0 if window is None or early else max(0, max(n - S, 0) - window + 1) // P for n in lengths]
    X = B * W + 3
    k, v = (np.full((G, X, P, K), np.nan, np.float32) for _ in range(2))
    table = np.full((B, W), NOWHERE, np.int32)
    pages = rng.permutation(X)
    start_BS, end_BS = np.zeros((B, S), np.int32), np.zeros((B, S), np.int32)
    for b in range(B):
        end_BS[b] = position_BS[b] - first_B[b] * P + 1
        start_BS[b] = 0 if window is None else end_BS[b] - window
        seen = [t for s in range(S) for t in range(max(start_BS[b, s], 0), max(end_BS[b, s], 0))]
        for t in sorted(set(seen)):
            table[b, t // P] = page = pages[b * W + t // P]
            k[:, page, t % P], v[:, page, t % P] = rng.normal(size=(2, G, K))
    q = rng.normal(size=(B, S, H, K)).astype(np.float32)
    q, k, v = (jnp.asarray(a) for a in (q, k, v))
    if dtype == jnp.float8_e4m3fn:
        return q.astype(jnp.bfloat16), k.astype(dtype), v.astype(dtype), table, start_BS, end_BS
    return q.astype(dtype), k.astype(dtype), v.astype(dtype), table, start_BS, end_BS


def definition(q, k, v, table, start, end):
    """In float64; NaN where a query sees nothing."""
    q, k, v = (np.asarray(a.astype(jnp.float32), np.float64) for a in (q, k, v))
    B, S, H, K = q.shape
    G, _, P, _ = k.shape
    out = np.full(q.shape, np.nan)
    for b in range(B):
        for s in range(S):
            keys = np.arange(max(start[b, s], 0), max(end[b, s], 0))
            if not len(keys):
                continue
            page = table[b, keys // P]
            for h in range(H):
                k_TK, v_TK = k[h * G // H, page, keys % P], v[h * G // H, page, keys % P]
                scores = k_TK @ q[b, s, h] * K**-0.5
                weights = np.exp(scores - scores.max())
                out[b, s, h] = weights @ v_TK / weights.sum()
    return out


@functools.cache
def interpreted(block: int = 128, **how):
    # Compiled once for all cases of equal shapes: the interpreter's programs take seconds to compile.
    return jax.jit(functools.partial(tpu.paged_attention, block=block, interpret=pltpu.InterpretParams(**how)))


def kernel(*arguments, **how):
    try:
        return np.asarray(interpreted(**{"uninitialized_memory": "nan"} | how)(*arguments))
    finally:
        pltpu.reset_tpu_interpret_mode_state()


CASES = {
    "lengths of every kind": {"lengths": [1, 16, 17, 0, 128, 129, 300, 15]},
    "unused rows at the ends and between": {"lengths": [0, 0, 200, 0, 0, 33, 0, 0]},
    "no row is used": {"lengths": [0] * 8},
    "a window shorter than a page": {"lengths": [5, 100, 257, 7, 6, 8, 1, 601], "window": 7},
    "a window of several blocks": {"lengths": [10, 290, 600, 431, 300, 301, 999, 2000], "window": 300},
    "a window of whole pages": {"lengths": [160, 161, 175, 176, 159, 177, 320, 16], "window": 160},
    "tables that begin before the window": {
        "lengths": [290, 600, 431, 10, 0, 640, 129, 77],
        "window": 70,
        "early": True,
    },
    "one row": {"lengths": [333]},
    "several queries, an odd number of rows": {"lengths": [3, 64, 200], "S": 3},
    "several queries, window": {"lengths": [40, 200, 333], "S": 3, "window": 130},
    "queries before the row begins": {"lengths": [2, 1, 130], "S": 3},
    "pages of 64": {"lengths": [64, 65, 400], "P": 64, "W": 7},
    "pages of 8, eight heads on one": {"lengths": [77, 140], "H": 8, "G": 1, "P": 8},
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_the_definition(name):
    """And reads nothing else: all that no query sees is NaN, or not in the pool at all."""
    arguments = case(**CASES[name])
    found, expected = kernel(*arguments), definition(*arguments)
    sees = np.isfinite(expected)
    np.testing.assert_array_equal(found[~sees], 0.0)
    error = np.abs(found.astype(np.float64) - expected)[sees].max(initial=0.0)
    assert error <= 2e-6 * np.abs(expected[sees]).max(initial=0.0), error


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("name", ["lengths of every kind", "several queries, window"])
def test_reference_equals_the_definition(name, backend):
    q, k, v, table, *spans = case(**CASES[name])
    k, v = (jnp.nan_to_num(a) for a in (k, v))  # it multiplies what no query sees by 0
    table = np.where(table == NOWHERE, 0, table)
    expected = definition(q, k, v, table, *spans)
    sees = np.isfinite(expected)
    found = jax.jit(functools.partial(paged_attention, backend=backend))(q, k, v, table, *spans)
    assert np.abs(np.asarray(found) - expected)[sees].max() <= 2e-6 * np.abs(expected[sees]).max()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_narrow_types_are_no_worse_than_xlas(dtype):
    arguments = case(**CASES["lengths of every kind"], dtype=dtype)
    expected = definition(*arguments)
    sees = np.isfinite(expected)
    q, k, v, table, *spans = arguments
    k, v = (jnp.nan_to_num(a.astype(jnp.float32)).astype(dtype) for a in (k, v))
    theirs = paged_attention(q, k, v, np.where(table == NOWHERE, 0, table), *spans, backend="reference")
    ours = kernel(*arguments)
    mine, xlas = (
        np.sqrt(np.mean((np.asarray(a.astype(jnp.float32), np.float64) - expected)[sees] ** 2)) for a in (ours, theirs)
    )
    assert 0 < mine <= 1.02 * xlas, f"{mine:.3g}, XLA {xlas:.3g}"


def test_a_row_is_as_long_as_what_it_sees():
    """Blocks and pages of a decode step over windows of 4,096 in pages of 16, however long the rows."""
    shape = NORTH["decode_window"]
    length_B = np.random.default_rng(0).integers(shape.window, 100_000, shape.B)
    first_B = (length_B - shape.window) // shape.P
    end_B1 = (length_B - first_B * shape.P)[:, None]
    plan = np.asarray(rows.schedule(jnp.asarray(end_B1 - shape.window), jnp.asarray(end_B1), shape.W * shape.P, 512, 2))
    pages = -(-plan[:, rows.HIGH] // shape.P) - plan[:, rows.LOW] // shape.P
    assert pages.max() <= shape.window // shape.P + 1
    assert (plan[:, rows.END] - plan[:, rows.FIRST]).max() <= shape.window // 512 + 1
    assert (plan[:, rows.WHOLE_END] - plan[:, rows.WHOLE_FIRST]).min() >= shape.window // 512 - 1


def test_each_row_knows_the_next_one_of_its_chain():
    length = np.array([0, 700, 0, 100, 0, 0, 30, 513, 1, 0])
    plan = np.asarray(rows.schedule(jnp.zeros((10, 1), int), jnp.asarray(length[:, None]), 1024, 256, 2))
    np.testing.assert_array_equal(plan[:, rows.END] - plan[:, rows.FIRST], -(-length // 256))
    np.testing.assert_array_equal(plan[:, rows.STEP], [0, 0, 3, 3, 4, 0, 0, 1, 4, 5])
    np.testing.assert_array_equal(plan[:, rows.NEXT], [1, 3, 3, 10, 10, 6, 7, 8, 10, 10])


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_no_races(mode, capfd):
    assert not _races(mode, capfd)


@pytest.mark.parametrize("mode", ["eager", "on_wait"])
def test_one_buffer_for_all_blocks_is_seen(mode, capfd, monkeypatch):
    """The next block would arrive where this one is being read."""
    monkeypatch.setattr(tpu, "_slot", lambda step: step * 0)
    assert _races(mode, capfd)


def _races(mode: str, capfd) -> bool:
    how = {"dma_execution_mode": mode, "detect_races": True, "num_cores_or_threads": 2}
    interpreted.cache_clear()
    kernel(*case([300, 1, 0, 200], H=1, G=1, P=64, W=5), **how)
    return "RACE DETECTED" in capfd.readouterr().out


def described(shape, dtype, pages: int = 4096):
    q = jax.ShapeDtypeStruct((shape.B, shape.S, shape.H, shape.K), dtype if dtype == jnp.float32 else jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((shape.G, pages, shape.P, shape.K), dtype)
    span = jax.ShapeDtypeStruct((shape.B, shape.S), jnp.int32)
    return q, pool, pool, jax.ShapeDtypeStruct((shape.B, shape.W), jnp.int32), span, span


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn])
@pytest.mark.parametrize("shape", NORTH.values(), ids=NORTH.keys())
def test_lowers_for_tpu(shape, dtype):
    for platform, calls in (("tpu", 1), ("cpu", 0)):
        auto = jax.jit(functools.partial(paged_attention, backend="auto"))
        exported = jax.export.export(auto, platforms=[platform])(*described(shape, dtype))
        assert exported.mlir_module().count("@tpu_custom_call(") == calls


@pytest.mark.parametrize(
    "shape, dtype",
    [
        ("decode_full_32k", jnp.bfloat16),
        ("decode_full_32k", jnp.float8_e4m3fn),
        ("decode_full_128k", jnp.float32),
        ("prefill_window", jnp.bfloat16),
    ],
)
@pytest.mark.parametrize("chip", TPUS)
def test_compiles_for(chip, shape, dtype):
    """The pools stay where they are: no copy of them, and of no row's pages either; fp8 takes half of bfloat16."""
    needs_compiler(chip)
    specs = described(NORTH[shape], dtype)
    compiled = aot.compile_for(chip, tpu.paged_attention, *specs)
    memory = compiled.memory_analysis()
    pools = 2 * specs[1].size * jnp.dtype(dtype).itemsize
    assert memory.temp_size_in_bytes < pools / 4
    assert memory.argument_size_in_bytes < 1.2 * pools


def test_a_block_too_large_fails():
    needs_compiler("v5e")
    with pytest.raises(Exception, match=re.compile("vmem|VMEM|RESOURCE_EXHAUSTED")):
        aot.compile_for(
            "v5e",
            functools.partial(tpu.paged_attention, block=16384),
            *described(NORTH["decode_full_128k"], jnp.float32),
        )


def test_refusals():
    q, k, v, *rest = case([20, 30])
    with pytest.raises(ValueError, match="'cudnn' is not known; choose one of"):
        paged_attention(q, k, v, *rest, backend="cudnn")
    with pytest.raises(ValueError, match="do not fit"):
        paged_attention(q[:1], k, v, *rest, backend="reference")
    with pytest.raises(ValueError, match="whose width divides by 128, not 64"):
        paged_attention(q[..., :64], k[..., :64], v[..., :64], *rest, backend="tpu")
    with pytest.raises(ValueError, match="pages of 8, 16, 32, 64 or a multiple of 128 tokens, not 12"):
        paged_attention(q, k[:, :, :12], v[:, :, :12], *rest, backend="tpu")
    wide = jnp.zeros((2, 600, *q.shape[2:]))
    with pytest.raises(ValueError, match="1024 queries of one key/value head at most, not 600 tokens of 2 heads"):
        paged_attention(wide, k, v, rest[0], *jnp.zeros((2, 2, 600), int), backend="tpu")
