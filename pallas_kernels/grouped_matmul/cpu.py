"""Grouped products on a CPU: the rows of a group in tiles of its own, one plain product a tile, only these computed.

XLA's ragged product computes every group for every row there.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.gating import gated_slopes

TILE = 128  # rows at most: of 64, 128 and 256 the fastest


class Plan(NamedTuple):
    """Where rows lie in tiles of one group each, the last one of a group filled up; tiles are as many as can be needed.

    row_nT: the row at a place of a tile, P where there is none. group_n: whose tile it is. place_P: the place of a row,
    n * T where it belongs to no group.
    """

    row_nT: jax.Array
    group_n: jax.Array
    place_P: jax.Array


def plan(P: int, sizes_E: jax.Array) -> Plan:
    """The plan of P rows."""
    E = len(sizes_E)
    T = min(TILE, max(8, 1 << (P // E).bit_length()))
    n = P // T + E
    ends_E, tiles_E = jnp.cumsum(sizes_E), -(-sizes_E // T)
    starts_E, last_E = ends_E - sizes_E, jnp.cumsum(tiles_E)
    first_E = last_E - tiles_E
    tile_n, row_P = jnp.arange(n, dtype=jnp.int32), jnp.arange(P, dtype=jnp.int32)

    def group(ends_E, x):
        return jnp.minimum(jnp.searchsorted(ends_E, x, side="right", method="compare_all"), E - 1)

    group_n, group_P = group(last_E, tile_n), group(ends_E, row_P)
    row_nT = (starts_E[group_n] + (tile_n - first_E[group_n]) * T)[:, None] + jnp.arange(T, dtype=jnp.int32)
    place_P = first_E[group_P] * T + row_P - starts_E[group_P]
    return Plan(
        jnp.where(row_nT < ends_E[group_n][:, None], row_nT, P),
        group_n,
        jnp.where(row_P < ends_E[-1], place_P, n * T),
    )


def _tiles(rows_PD: jax.Array, at: Plan) -> jax.Array:
    P = len(rows_PD)
    return jnp.where((at.row_nT < P)[..., None], rows_PD[jnp.minimum(at.row_nT, P - 1)], 0)


def _rows(tiles_nTF: jax.Array, at: Plan) -> jax.Array:
    flat = tiles_nTF.reshape(-1, tiles_nTF.shape[-1])
    return jnp.where((at.place_P < len(flat))[:, None], flat[jnp.minimum(at.place_P, len(flat) - 1)], 0)


def _each(product: Callable, matrices: tuple[jax.Array, ...], at: Plan, *rows: jax.Array) -> list[jax.Array]:
    """product(matrices of its group, tiles of rows) of every tile, as rows."""

    def one(tile):
        group, *tiles = tile
        return product(*(w_EDF[group] for w_EDF in matrices), *tiles)

    return [_rows(out, at) for out in jax.lax.map(one, (at.group_n, *(_tiles(x, at) for x in rows)))]


def _summed(x_PD: jax.Array, slopes: tuple[jax.Array, ...], at: Plan, like: jax.Array) -> list[jax.Array]:
    """Σ over a group's rows of x^T slope, [E, D, F] in float32 and then in the type of `like`."""

    def add(sums, tile):
        group, x_TD, *slopes_TF = tile
        new = (jnp.matmul(x_TD.T, d_TF, preferred_element_type=jnp.float32) for d_TF in slopes_TF)
        return tuple(sum_EDF.at[group].add(w_DF) for sum_EDF, w_DF in zip(sums, new, strict=True)), None

    zeros = tuple(jnp.zeros_like(like, jnp.float32) for _ in slopes)
    sums, _ = jax.lax.scan(add, zeros, (at.group_n, *(_tiles(x, at) for x in (x_PD, *slopes))))
    return [sum_EDF.astype(like.dtype) for sum_EDF in sums]


def gmm(x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """See `api.grouped_matmul`."""
    return _each(lambda w_DF, x_TD: (x_TD @ w_DF,), (w_EDF,), plan(len(x_PD), sizes_E), x_PD)[0]


def gradients(x_PD, w_EDF, sizes_E, d_PF) -> tuple[jax.Array, jax.Array]:
    """The gradients in x and w of gmm, from that in its result."""
    at = plan(len(x_PD), sizes_E)
    (dx_PD,) = _each(lambda w_DF, d_TF: (d_TF @ w_DF.T,), (w_EDF,), at, d_PF)
    return dx_PD, *_summed(x_PD, (d_PF,), at, w_EDF)


def gated(x_PD, gate_EDF, up_EDF, sizes_E, *, save: bool) -> tuple[jax.Array, ...]:
    """(silu(a) b,), a = x gate, b = x up, all [P, F]; with `save` also a and b."""

    def product(gate_DF, up_DF, x_TD):
        a_TF, b_TF = x_TD @ gate_DF, x_TD @ up_DF
        return (jax.nn.silu(a_TF) * b_TF, a_TF, b_TF)[: 3 if save else 1]

    return tuple(_each(product, (gate_EDF, up_EDF), plan(len(x_PD), sizes_E), x_PD))


def gated_gradients(x_PD, gate_EDF, up_EDF, sizes_E, a_PF, b_PF, d_PF) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients in x, gate and up."""
    at, slopes = plan(len(x_PD), sizes_E), gated_slopes([d_PF, a_PF, b_PF])
    (dx_PD,) = _each(lambda gate, up, da, db: (da @ gate.T + db @ up.T,), (gate_EDF, up_EDF), at, *slopes)
    return dx_PD, *_summed(x_PD, tuple(slopes), at, gate_EDF)
