"""Hopper attention: bounds, block loops, the kernels in an interpreter, their lowering, and their compilation."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import hopper_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import needs_compiler
from jax import export

from pallas_kernels.attention import attention, gpu, gpu_backward
from pallas_kernels.attention.gpu_common import LOG2E, Tiles, limits, tile_bounds

SMALL = Tiles(rows=64, block=64)


@functools.partial(jax.jit, static_argnums=(2, 3))
def seen_by_queries(start_BS, end_BS, T: int, tiles: Tiles):
    """(bounds, limits) as the forward and dq kernels get them."""
    limits_B2S = limits(start_BS, end_BS, T, tiles.tile)
    return tile_bounds(limits_B2S, T, tiles), limits_B2S


@functools.partial(jax.jit, static_argnums=(2, 3))
def seen_by_keys(start_BS, end_BS, T: int, tiles: Tiles):
    """(bounds, limits) as the dk and dv kernel gets them."""
    limits_B2S = limits(start_BS, end_BS, T, tiles.block)
    return gpu_backward.key_tile_bounds(limits_B2S, T, tiles), limits_B2S


def packed_spans(random, S: int, T: int, offset: int, *, documents: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """[1, S] twice: the keys of each query under a window within documents, at positions i + offset."""
    position_S = np.arange(S) + offset
    edges = np.sort(random.integers(0, max(T, 1), documents))
    document_S = np.concatenate([[0], edges])[np.searchsorted(edges, position_S, side="right")]
    start_S = np.maximum(np.maximum(document_S, position_S - window + 1), 0)
    return start_S[None].astype(np.int32), position_S[None].astype(np.int32) + 1


def seen(start_BS: np.ndarray, end_BS: np.ndarray, T: int) -> np.ndarray:
    """[B, S, T]: which keys each query sees."""
    return (np.arange(T) >= start_BS[:, :, None]) & (np.arange(T) < end_BS[:, :, None])


def cases():
    for seed in range(8):
        random = np.random.default_rng(seed)
        T = int(random.integers(1, 400))
        S = int(random.integers(1, T + 1))
        offset = T - S if seed % 3 else int(random.integers(0, T))
        window = int(random.choice([1, 30, 64, 1000]))
        start_BS, end_BS = packed_spans(random, S, T, offset, documents=int(random.integers(0, 4)), window=window)
        if seed % 4 == 0:  # The last queries see nothing.
            start_BS[:, -int(random.integers(1, S + 1)) :] = T
        yield pytest.param(start_BS, end_BS, T, id=f"S{S}-T{T}-offset{offset}-window{window}-{seed}")


def dense(q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, dout_BSHK, dlse_BHS=0.0):
    """out, lse, dq, dk, dv in float64 by their definitions."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q_BSHK, k_BTGK, v_BTGK, dout_BSHK))
    R, G = q.shape[2] // k.shape[2], k.shape[2]
    k, v = (np.repeat(x, R, axis=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    s = np.where(seen(start_BS, end_BS, k.shape[1])[:, None], np.einsum("bshk,bthk->bhst", q, k) * scale, -np.inf)
    top = np.maximum(s.max(-1, keepdims=True), -1e30)
    e = np.exp(s - top)
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total > 0, total, 1)
    lse = np.where(total > 0, top + np.log(np.where(total > 0, total, 1)), -np.inf)[..., 0]
    out = np.einsum("bhst,bthk->bshk", p, v)
    dp = np.einsum("bshk,bthk->bhst", dout, v)
    ds = p * (dp - (np.einsum("bshk,bshk->bhs", dout, out) - dlse_BHS)[..., None]) * scale
    groups = [*k.shape[:2], G, R, k.shape[-1]]
    dk, dv = np.einsum("bhst,bshk->bthk", ds, q), np.einsum("bhst,bshk->bthk", p, dout)
    return out, lse, np.einsum("bhst,bthk->bshk", ds, k), *(x.reshape(groups).sum(3) for x in (dk, dv))


@pytest.mark.parametrize("start_BS, end_BS, T", list(cases()))
def test_key_bounds_name_exactly_the_blocks_seen(start_BS, end_BS, T):
    S, (tile, parts, block) = start_BS.shape[1], (128, 2, 64)
    bounds_BUN = np.asarray(seen_by_queries(start_BS, end_BS, T, SMALL)[0])
    mask_ST = seen(start_BS, end_BS, T)[0]
    assert bounds_BUN.shape == (1, -(-S // tile), 2 + 2 * parts)
    for u, (lo, hi, *whole) in enumerate(bounds_BUN[0].tolist()):
        blocks = [
            n for n in range(-(-T // block)) if mask_ST[u * tile : (u + 1) * tile, n * block : (n + 1) * block].any()
        ]
        assert 0 <= lo < hi <= -(-T // block)
        assert (lo, hi) == (blocks[0], blocks[-1] + 1) if blocks else hi == lo + 1
        for part in range(parts):
            first = u * tile + part * (tile // parts)
            rows_ST = mask_ST[first : first + tile // parts]
            if not len(rows_ST):
                continue
            for n in range(lo, hi):
                all_of_it = (n + 1) * block <= T and rows_ST[:, n * block : (n + 1) * block].all()
                assert (whole[2 * part] <= n < whole[2 * part + 1]) == all_of_it, (u, part, n)


@pytest.mark.parametrize("start_BS, end_BS, T", list(cases()))
def test_query_bounds_hold_every_query_and_only_whole_blocks(start_BS, end_BS, T):
    S, (tile, parts, block) = start_BS.shape[1], (128, 2, 64)
    bounds_BUN = np.asarray(seen_by_keys(start_BS, end_BS, T, SMALL)[0])
    mask_ST = seen(start_BS, end_BS, T)[0]
    assert bounds_BUN.shape == (1, -(-T // tile), 2 + 2 * parts)
    for u, (lo, hi, *whole) in enumerate(bounds_BUN[0].tolist()):
        blocks = [
            n for n in range(-(-S // block)) if mask_ST[n * block : (n + 1) * block, u * tile : (u + 1) * tile].any()
        ]
        assert (lo, hi) == (blocks[0], blocks[-1] + 1) if blocks else lo == hi
        for part in range(parts):
            first = u * tile + part * (tile // parts)
            columns_ST = mask_ST[:, first : first + tile // parts]
            for n in range(lo, hi):
                full = columns_ST.shape[1] == tile // parts  # a tile's part past the last key is masked
                all_of_it = full and columns_ST[n * block : (n + 1) * block].all()
                assert (whole[2 * part] <= n < whole[2 * part + 1]) == all_of_it, (u, part, n)


def rows_of(x: np.ndarray, first: int, count: int) -> np.ndarray:
    """As a copy into shared memory: `count` rows, zeros past the end."""
    part = x[first : first + count]
    return np.pad(part, [(0, count - len(part))] + [(0, 0)] * (x.ndim - 1))


def blocks_forward(q_SK, k_TK, v_TK, start_BS, end_BS, tiles):
    """One head of the forward kernel, block by block in float64."""
    T, K = k_TK.shape
    rows, block = tiles.rows, tiles.block
    scale = K**-0.5 * LOG2E
    bounds_UN, (start_S, end_S) = (np.asarray(x)[0] for x in seen_by_queries(start_BS, end_BS, T, tiles))
    outs, lses = [], []
    for u, (lo, hi, *whole) in enumerate(bounds_UN.tolist()):
        for wg in range(tiles.warpgroups):
            row = u * tiles.tile + wg * rows
            q = rows_of(q_SK, row, rows)
            m, l, acc = np.full(rows, gpu.NO_MAXIMUM), np.zeros(rows), np.zeros((rows, K))
            for n in range(lo, hi):
                s = q @ rows_of(k_TK, n * block, block).T
                if not whole[2 * wg] <= n < whole[2 * wg + 1]:
                    key = np.arange(block) + n * block
                    s = np.where(
                        (key >= start_S[row : row + rows, None]) & (key < end_S[row : row + rows, None]), s, -np.inf
                    )
                m_new = np.maximum(m, s.max(1) * scale)
                p, decay = np.exp2(s * scale - m_new[:, None]), np.exp2(m - m_new)
                m, l = m_new, l * decay + p.sum(1)
                acc = acc * decay[:, None] + p @ rows_of(v_TK, n * block, block)
            outs.append(acc / np.where(l > 0, l, np.inf)[:, None])
            lses.append(np.where(l > 0, m / LOG2E + np.log(np.where(l > 0, l, 1)), -np.inf))
    return np.concatenate(outs)[: len(q_SK)], np.concatenate(lses)[: len(q_SK)]


def blocks_dkv(q_SRK, k_TK, v_TK, start_BS, end_BS, dout_SRK, stats_R2S, tiles):
    """One key/value head of the dk and dv kernel, block by block in float64."""
    T, K = k_TK.shape
    rows, block = tiles.rows, tiles.block
    bounds_UN, (start_S, end_S) = (np.asarray(x)[0] for x in seen_by_keys(start_BS, end_BS, T, tiles))
    dk_TK, dv_TK = np.zeros((len(bounds_UN) * tiles.tile, K)), np.zeros((len(bounds_UN) * tiles.tile, K))
    for u, (lo, hi, *whole) in enumerate(bounds_UN.tolist()):
        for wg in range(tiles.warpgroups):
            row = u * tiles.tile + wg * rows
            k, v = rows_of(k_TK, row, rows), rows_of(v_TK, row, rows)
            for r in range(q_SRK.shape[1]):
                for n in range(lo, hi):
                    run = slice(n * block, (n + 1) * block)
                    q, dout = (rows_of(x[:, r], n * block, block) for x in (q_SRK, dout_SRK))
                    s = k @ q.T + stats_R2S[r, 0, run]
                    if not whole[2 * wg] <= n < whole[2 * wg + 1]:
                        key = np.arange(rows)[:, None] + row
                        s = np.where((key >= start_S[run]) & (key < end_S[run]), s, -np.inf)
                    p = np.exp2(s * (K**-0.5 * LOG2E))
                    dv_TK[row : row + rows] += p @ dout
                    dk_TK[row : row + rows] += (p * (v @ dout.T + stats_R2S[r, 1, run])) @ q
    return dk_TK[:T] * K**-0.5, dv_TK[:T]


@pytest.mark.parametrize("start_BS, end_BS, T", list(cases()))
def test_block_loops_compute_attention(start_BS, end_BS, T):
    random = np.random.default_rng(T)
    S, H, K = start_BS.shape[1], 2, 16
    q_BSHK, dout_BSHK = random.normal(size=(2, 1, S, H, K))
    k_BTGK, v_BTGK = random.normal(size=(2, 1, T, 1, K))
    out, lse, _, dk, dv = dense(q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, dout_BSHK)
    for h in range(H):
        got = blocks_forward(q_BSHK[0, :, h], k_BTGK[0, :, 0], v_BTGK[0, :, 0], start_BS, end_BS, SMALL)
        np.testing.assert_allclose(got[0], out[0, :, h], atol=1e-9)
        np.testing.assert_allclose(got[1], lse[0, h], atol=1e-9)
    float32 = (jnp.asarray(x, jnp.float32) for x in (out, lse, dout_BSHK, np.zeros_like(lse)))
    stats_R2S = np.asarray(gpu_backward.statistics(*float32, K**-0.5, SMALL.block))[0]
    got = blocks_dkv(q_BSHK[0], k_BTGK[0, :, 0], v_BTGK[0, :, 0], start_BS, end_BS, dout_BSHK[0], stats_R2S, SMALL)
    np.testing.assert_allclose(got[0], dk[0, :, 0], atol=2e-4)
    np.testing.assert_allclose(got[1], dv[0, :, 0], atol=2e-4)


def small_problem(S: int, T: int, offset: int, blind: int, window: int):
    """bf16 arrays of two query heads on one key/value head, K = 64, a window in two documents."""
    random = np.random.default_rng(S)
    start_BS, end_BS = packed_spans(random, S, T, offset, documents=1, window=window)
    start_BS[:, S - blind :] = T
    q_BSHK, dout_BSHK = (jnp.asarray(random.normal(size=(1, S, 2, 64)), jnp.bfloat16) for _ in range(2))
    k_BTGK, v_BTGK = (jnp.asarray(random.normal(size=(1, T, 1, 64)), jnp.bfloat16) for _ in range(2))
    return q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, dout_BSHK


@pytest.mark.parametrize("S, T, offset, blind, window", [(200, 200, 0, 0, 190), (72, 200, 100, 5, 90)])
def test_the_kernels_compute_attention_in_the_interpreter(S, T, offset, blind, window):
    """The kernels themselves, copies, barriers and late products included; the tolerance is that of bf16."""
    q, k, v, start_BS, end_BS, dout = small_problem(S, T, offset, blind, window)
    dlse = np.random.default_rng(1).normal(size=(1, 2, S)).astype(np.float32)
    out, lse, dq, dk, dv = dense(q, k, v, start_BS, end_BS, dout, dlse)
    how = {"scale": q.shape[3] ** -0.5}
    arguments = q, k, v, jnp.asarray(start_BS), jnp.asarray(end_BS)
    try:
        with hopper_interpreter.interpreted(detect_races=True) as races:
            forward = jax.jit(functools.partial(gpu.forward, tiles=SMALL, **how))
            got_out, got_lse = forward(*arguments)
            backward = jax.jit(functools.partial(gpu.backward, dq_tiles=SMALL, dkv_tiles=SMALL, **how))
            gradients = backward(*arguments, got_out, got_lse, dout, dlse)
            jax.block_until_ready(gradients)
            assert not races()
    except ImportError as error:
        pytest.skip(f"jax {jax.__version__} keeps its Mosaic GPU interpreter elsewhere: {error}")
    np.testing.assert_allclose(got_lse, lse, atol=1e-5)
    for got, expected in zip((got_out, *gradients), (out, dq, dk, dv), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=0.01 * np.abs(expected).max())


def specs(S: int, T: int | None = None, *, H: int = 32, G: int = 4, K: int = 128):
    """Arguments of `trained`, of North's attention."""
    q = jax.ShapeDtypeStruct((1, S, H, K), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, T or S, G, K), jnp.bfloat16)
    span = jax.ShapeDtypeStruct((1, S), jnp.int32)
    return q, k, k, span, span, q


def trained(q, k, v, start, end, dout):
    """Forward and backward by the public function."""
    out, pull = jax.vjp(lambda *x: attention(*x, start, end, backend="gpu")[0], q, k, v)
    return out, pull(dout)


def lowered(function, arguments) -> str:
    exported = export.export(
        jax.jit(function),
        platforms=["cuda"],
        disabled_checks=[export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")],
    )(*arguments)
    return exported.mlir_module()


@pytest.mark.parametrize("S, T", [(4096, 4096), (131072, 131072), (1000, 1000), (40, 40), (129, 4097)])
def test_lowers_for_cuda_without_a_plugin(S, T):
    assert lowered(trained, specs(S, T)).count("mosaic_gpu_v2") == 3


def test_tiles_beyond_shared_memory_are_refused_when_lowered():
    *arguments, dout = specs(4096)
    lse = jax.ShapeDtypeStruct((1, 32, 4096), jnp.float32)
    with pytest.raises(Exception, match="max_smem_bytes"):
        lowered(functools.partial(gpu.forward, scale=1.0, tiles=Tiles(stages=4)), arguments)
    with pytest.raises(Exception, match="max_smem_bytes"):
        large = functools.partial(gpu.backward, scale=1.0, dkv_tiles=Tiles(block=64, stages=6))
        lowered(large, (*arguments, dout, lse, dout, lse))


def test_refusals():
    q, k, v, start, end, _ = (jnp.zeros(x.shape, x.dtype) for x in specs(8))
    for wrong in (lambda x: x.astype(jnp.float32), lambda x: x[..., :96]):
        with pytest.raises(ValueError, match="takes bfloat16 or float16 heads whose width divides by 64, not"):
            attention(*map(wrong, (q, k, v)), start, end, backend="gpu")


COMPILE = """
from pallas_kernels import aot
from test_attention_gpu import specs, trained
for chip, S in (("h100", 4096), ("h200", 131072)):
    compiled = aot.compile_for(chip, trained, *specs(S))
    print(f"temporaries {S}", compiled.memory_analysis().temp_size_in_bytes)
"""


def test_compiles_for_hopper_without_spills():
    needs_compiler("h100")
    path = os.pathsep.join([*map(str, Path(__file__).parents[:3:2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    ran = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=200)
    report = ran.stdout + ran.stderr
    assert ran.returncode == 0, report[-3000:]
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert len(spills) == 6 and set(spills) == {("0", "0")}, spills
    # ptxas serialises wgmma where it cannot keep an accumulator in registers while a product is under way.
    assert "serialized" not in report and "warpgroup.wait is injected" not in report, report
    # Linear in the length: statistics and limits, no [S, T] anything.
    temporaries = {int(S): int(size) for S, size in re.findall(r"temporaries (\d+) (\d+)", report)}
    assert temporaries[131072] <= 33 * temporaries[4096] <= 33 * 2**23
