"""Rotary positions as a Pallas TPU kernel: one pass over queries or keys as projections leave them, heads side by side.

XLA lays pairs out for neighbours to meet, and turns the whole array around for it (docs/kernels.md has the bytes). In
a kernel a neighbour is a rotation of lanes.

It is a pass of its own and no part of the attention kernels: these visit a block of keys once for every block of
queries that sees it, and in dk and dv a block of queries once for every block of keys, and would turn it every time.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.tpu_common import LANES, round_up

ROWS = 256  # tokens of a block: with 32 heads of 128, 2 MiB in bfloat16
TURNED = 32  # tokens turned at once, which bounds the program


def takes(x_BSHK: jax.Array) -> bool:
    """Whether the kernel has tiles for it, and enough to do."""
    return x_BSHK.shape[3] % LANES == 0 and x_BSHK.shape[1] >= LANES


def _kernel(x_ref, cos_ref, sin_ref, out_ref, *, heads: int):
    K = cos_ref.shape[2]
    even_RK = jax.lax.broadcasted_iota(jnp.int32, (TURNED, K), 1) % 2 == 0

    def turn(i, _):
        rows = pl.ds(i * TURNED, TURNED)
        cos_RK, sin_RK = (ref[0, rows, :].astype(jnp.float32) for ref in (cos_ref, sin_ref))
        for h in range(heads):
            columns = pl.ds(h * K, K)
            x_RK = x_ref[0, rows, columns].astype(jnp.float32)
            other_RK = jnp.where(even_RK, pltpu.roll(x_RK, K - 1, 1), pltpu.roll(x_RK, 1, 1))
            out_ref[0, rows, columns] = (x_RK * cos_RK + other_RK * sin_RK).astype(out_ref.dtype)

    jax.lax.fori_loop(0, x_ref.shape[1] // TURNED, turn, None)


def rotate(x_BSHK: jax.Array, cos_BSK: jax.Array, sin_BSK: jax.Array, *, interpret=False) -> jax.Array:
    """See `api.rotate`. Takes heads of a multiple of 128; `interpret` as in `pl.pallas_call`."""
    B, S, H, K = x_BSHK.shape
    rows = min(ROWS, round_up(S, TURNED))

    def block(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, rows, width), lambda b, i: (b, i, 0))

    out_BSL = pl.pallas_call(
        functools.partial(_kernel, heads=H),
        name="rotary",
        grid=(B, pl.cdiv(S, rows)),
        in_specs=[block(H * K), block(K), block(K)],
        out_specs=block(H * K),
        out_shape=jax.ShapeDtypeStruct((B, S, H * K), x_BSHK.dtype),
        cost_estimate=pl.CostEstimate(
            flops=3 * x_BSHK.size, transcendentals=0, bytes_accessed=2 * x_BSHK.nbytes + cos_BSK.nbytes + sin_BSK.nbytes
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
    )(x_BSHK.reshape(B, S, H * K), cos_BSK, sin_BSK)
    return out_BSL.reshape(x_BSHK.shape)
