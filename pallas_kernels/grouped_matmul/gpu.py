"""Grouped products on Hopper, and their gradients, by the two loops of `gpu_kernels`.

bfloat16 with sums in float32. The kernels are compiled for H100 and H200 without spills and have not been run on
either: nothing is known about their speed.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.gating import gated_slopes
from pallas_kernels.grouped_matmul.gpu_kernels import Tiles, rows_by_matrices, rows_by_rows

TILES = Tiles()


def supports(*arrays: jax.Array) -> bool:
    """Whether all are bfloat16: of float32, wgmma takes only the first ten bits behind the point (TF32)."""
    return all(x.dtype == jnp.bfloat16 for x in arrays)


def _check(arrays: Sequence[jax.Array]) -> None:
    if not supports(*arrays):
        names = sorted({str(x.dtype) for x in arrays})
        raise ValueError(f"grouped_matmul: operands are {names}; backend 'gpu' wants all bfloat16, others take 'xla'")


def gmm(x_PD: jax.Array, w: jax.Array, sizes_E: jax.Array, *, transposed: bool = False, tiles: Tiles = TILES):
    """out[p] = x_PD[p] @ w[e] with w [E, D, F], or `transposed` x_PD[p] @ w[e]^T with w [E, F, D]: [P, F]."""
    _check((x_PD, w))
    name = "grouped_rows_by_transposed" if transposed else "grouped_rows_by_matrices"
    return rows_by_matrices(
        name, lambda sums: sums, [x_PD], [w], sizes_E, transposed=transposed, outputs=1, tiles=tiles
    )[0]


def tgmm(x_PD: jax.Array, y_PF: jax.Array, sizes_E: jax.Array, *, tiles: Tiles = TILES) -> jax.Array:
    """out_EDF[e] = sum over the rows p of e of x_PD[p]^T y_PF[p]; zero for a group without rows."""
    _check((x_PD, y_PF))
    return rows_by_rows(x_PD, y_PF, sizes_E, tiles=tiles)


def gradients(
    x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, d_PF: jax.Array, *, tiles: Tiles = TILES
) -> tuple[jax.Array, jax.Array]:
    """The gradients in x and w of gmm, from that in its result."""
    return gmm(d_PF, w_EDF, sizes_E, transposed=True, tiles=tiles), tgmm(x_PD, d_PF, sizes_E, tiles=tiles)


def gated(
    x_PD: jax.Array, gate_EDF: jax.Array, up_EDF: jax.Array, sizes_E: jax.Array, *, save: bool, tiles: Tiles = TILES
) -> tuple[jax.Array, ...]:
    """(silu(a) b,), a = x gate, b = x up, all [P, F]; with `save` also a and b, rounded to x's dtype."""
    _check((x_PD, gate_EDF, up_EDF))

    def combine(sums):
        a, b = sums
        hidden = a * jax.nn.sigmoid(a) * b
        return [hidden, a, b] if save else [hidden]

    name, outputs = ("grouped_gated_saving", 3) if save else ("grouped_gated", 1)
    weights = [gate_EDF, up_EDF]
    out = rows_by_matrices(name, combine, [x_PD], weights, sizes_E, transposed=False, outputs=outputs, tiles=tiles)
    return tuple(out)


def gated_gradients(
    x_PD: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    sizes_E: jax.Array,
    a_PF: jax.Array,
    b_PF: jax.Array,
    d_PF: jax.Array,
    *,
    tiles: Tiles = TILES,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients in x, gate and up.

    Those in a and b are written out once, by XLA: wgmma wants the rows of a product in shared memory as they are
    copied there.
    """
    _check((x_PD, gate_EDF, up_EDF, d_PF))
    slopes = gated_slopes([d_PF, a_PF, b_PF])
    (dx_PD,) = rows_by_matrices(
        "grouped_gated_backward", lambda sums: sums, slopes, [gate_EDF, up_EDF], sizes_E,
        transposed=True, outputs=1, tiles=tiles,
    )  # fmt: skip
    return dx_PD, *(tgmm(x_PD, slope_PF, sizes_E, tiles=tiles) for slope_PF in slopes)
