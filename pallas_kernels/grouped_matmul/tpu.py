"""Grouped products as Pallas TPU kernels: rows by matrices, rows by rows, and the gated pair, with their gradients.

Rows come in tiles of `Tiles.rows` through Pallas' own pipeline. A tile is visited once for each group it holds, in
order, so each step has one tile and one matrix; a visit multiplies only its own rows, in pieces. Work is wasted only
where two groups share a unit of rows (16 in bfloat16, 8 in float32: the least a register holds), a unit a boundary: 3 %
and 1.5 % of North's 65,536 rows.

Contractions are never split: a whole row of `x` and a block of columns of the matrix lie in VMEM together.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.gating import gated_slopes
from pallas_kernels.grouped_matmul.schedule import computed_rows, first_row, schedule
from pallas_kernels.grouped_matmul.tiles import TILES, Tiles, cut

# Of the 64 MiB of a v5p or TPU7x core. The 16 MiB that a kernel has unasked hold no float32 sum of a whole matrix.
VMEM_BYTES = 48 * 2**20


def _each_piece(low: jax.Array, high: jax.Array, rows: int, unit: int, piece: int, split: bool, work: Callable) -> None:
    """work(start, size, first) so that rows low to high of a tile each lie once in first to high of a piece.

    Whole pieces, then the rest: `split` into a piece for each power of two in it, else as one piece. Either way no unit
    is multiplied that has no row of the visit.
    """
    sizes = [unit << bit for bit in range(16) if unit << bit <= min(piece, rows)]
    start, count = first_row(low, unit), computed_rows(low, high, unit)
    whole = jax.lax.div(count, sizes[-1])  # not //, whose sign has a lowering that asks for the chip

    def whole_piece(i, _):
        first = pl.multiple_of(start + i * sizes[-1], unit)
        work(first, sizes[-1], jnp.maximum(first, low))

    jax.lax.fori_loop(0, whole, whole_piece, None)
    start += whole * sizes[-1]
    rest = count - whole * sizes[-1]
    if split:
        for size in reversed(sizes[:-1]):
            pl.when((rest & size) != 0)(functools.partial(work, pl.multiple_of(start, unit), size, low))
            start += rest & size
    else:
        for size in range(unit, sizes[-1], unit):
            pl.when(rest == size)(functools.partial(work, pl.multiple_of(start, unit), size, low))


def _own(shape: tuple[int, int], start: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Which of these rows, the first of which is `start`, lie in low to high."""
    row = start + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= low) & (row < high)


def _dot(left: jax.Array, right: jax.Array, contract: tuple[int, int]) -> jax.Array:
    # By default the MXU takes float32 in one bfloat16 pass.
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _tiles(tiles: Tiles | None, arrays: Sequence[jax.Array]) -> Tiles:
    dtypes = {x.dtype for x in arrays}
    if len(dtypes) > 1 or not dtypes <= TILES.keys():
        names = sorted(str(dtype) for dtype in dtypes)
        raise ValueError(f"grouped_matmul: operands are {names}; backend 'tpu' wants all bfloat16 or all float32")
    return tiles or TILES[arrays[0].dtype]


def _call(name, kernel, visits, blocks, inputs, in_specs, outputs, out_specs, *, flops, exponentials=0, scratch=()):
    sizes = [x.size * x.dtype.itemsize for x in (*inputs, *outputs)]
    return pl.pallas_call(
        kernel,
        name=name,
        out_shape=outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(blocks, len(visits[0])),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=sum(sizes), transcendentals=exponentials),
    )(*visits, *inputs)


def _rows_by_matrices(
    name: str,
    combine: Callable,
    rows_in: Sequence[jax.Array],
    matrices: Sequence[jax.Array],
    sizes_E: jax.Array,
    *,
    transposed: bool,
    outputs: int,
    tiles: Tiles | None,
    exponentials: int = 0,
) -> tuple[jax.Array, ...]:
    """Arrays [P, width] of combine(rows, matrices of the rows' group); rows that belong to no group are zero.

    `width` is the last dimension of the matrices, [E, K, width], or `transposed` the one before it, [E, width, K].
    """
    (P, K), width = rows_in[0].shape, matrices[0].shape[1 if transposed else 2]
    tiles = _tiles(tiles, (*rows_in, *matrices))
    rows, unit, columns, blocks = cut(P, rows_in[0].dtype, width, tiles)

    def kernel(group_G, tile_G, low_G, high_G, *refs):
        ins, mats, outs = refs[: len(rows_in)], refs[len(rows_in) : -outputs], refs[-outputs:]
        step = pl.program_id(1)
        low, high = low_G[step], high_G[step]

        @pl.when((step == 0) | (tile_G[step] != tile_G[jnp.maximum(step - 1, 0)]))
        def _():
            for out in outs:
                out[...] = jnp.zeros(out.shape, out.dtype)

        def work(start, size, first):
            window = pl.ds(start, size)
            own = _own((size, columns), start, first, high)
            for out, value in zip(outs, combine([x[window, :] for x in ins], mats), strict=True):
                # The other rows are zero, or a group's that came before.
                out[window, :] = jnp.where(own, value, out[window, :].astype(jnp.float32)).astype(out.dtype)

        _each_piece(low, high, rows, unit, tiles.piece, True, work)

    if transposed:
        matrix_spec = pl.BlockSpec((None, columns, K), lambda c, g, group_G, *_: (group_G[g], c, 0))
    else:
        matrix_spec = pl.BlockSpec((None, K, columns), lambda c, g, group_G, *_: (group_G[g], 0, c))
    return _call(
        name,
        kernel,
        schedule(sizes_E, P, rows, empty=False),
        blocks,
        (*rows_in, *matrices),
        [pl.BlockSpec((rows, K), lambda c, g, group_G, tile_G, *_: (tile_G[g], 0))] * len(rows_in)
        + [matrix_spec] * len(matrices),
        [jax.ShapeDtypeStruct((P, width), rows_in[0].dtype)] * outputs,
        [pl.BlockSpec((rows, columns), lambda c, g, group_G, tile_G, *_: (tile_G[g], c))] * outputs,
        flops=2 * P * K * width * len(matrices),
        exponentials=exponentials,
    )


def _rows_by_rows(
    name: str,
    combine: Callable,
    x_PD: jax.Array,
    rows_in: Sequence[jax.Array],
    sizes_E: jax.Array,
    *,
    outputs: int,
    tiles: Tiles | None,
    exponentials: int = 0,
) -> tuple[jax.Array, ...]:
    """Arrays [E, D, width] of Σ_p x_PD[p]ᵀ y[p] over each group's rows, y one of combine(rows); zero without rows."""
    (P, D), width, E = x_PD.shape, rows_in[0].shape[1], len(sizes_E)
    tiles = _tiles(tiles, (x_PD, *rows_in))
    rows, unit, columns, blocks = cut(P, x_PD.dtype, width, tiles)

    def kernel(group_G, tile_G, low_G, high_G, x_ref, *refs):
        ins, outs, sums = refs[: len(rows_in)], refs[len(rows_in) : -outputs], refs[-outputs:]
        step, last = pl.program_id(1), pl.num_programs(1) - 1
        low, high = low_G[step], high_G[step]

        @pl.when((step == 0) | (group_G[step] != group_G[jnp.maximum(step - 1, 0)]))
        def _():
            for total in sums:
                total[...] = jnp.zeros(total.shape, total.dtype)

        def work(start, size, first):
            window = pl.ds(start, size)
            x = x_ref[window, :]

            # Both sides: past the last row of an array lies anything, and zero times NaN is NaN.
            def own(values):
                kept = jnp.where(_own(values.shape, start, first, high), values.astype(jnp.float32), 0.0)
                return kept.astype(x.dtype)

            x = own(x)
            for total, value in zip(sums, combine([y[window, :] for y in ins]), strict=True):
                total[...] += _dot(x, own(value), (0, 0))

        _each_piece(low, high, rows, unit, tiles.depth, False, work)

        @pl.when((step == last) | (group_G[step] != group_G[jnp.minimum(step + 1, last)]))
        def _():
            for out, total in zip(outs, sums, strict=True):
                out[...] = total[...].astype(out.dtype)

    row_spec = pl.BlockSpec((rows, columns), lambda c, g, group_G, tile_G, *_: (tile_G[g], c))
    return _call(
        name,
        kernel,
        schedule(sizes_E, P, rows, empty=True),
        blocks,
        (x_PD, *rows_in),
        [pl.BlockSpec((rows, D), lambda c, g, group_G, tile_G, *_: (tile_G[g], 0))] + [row_spec] * len(rows_in),
        [jax.ShapeDtypeStruct((E, D, width), x_PD.dtype)] * outputs,
        [pl.BlockSpec((None, D, columns), lambda c, g, group_G, *_: (group_G[g], 0, c))] * outputs,
        scratch=[pltpu.VMEM((D, columns), jnp.float32)] * outputs,
        flops=2 * P * D * width * outputs,
        exponentials=exponentials,
    )


def gmm(x_PD: jax.Array, w: jax.Array, sizes_E: jax.Array, *, transposed: bool = False, tiles: Tiles | None = None):
    """out[p] = x_PD[p] @ w[e] with w [E, D, F], or `transposed` x_PD[p] @ w[e]ᵀ with w [E, F, D]: [P, F]."""
    contract = (1, 1) if transposed else (1, 0)
    (out,) = _rows_by_matrices(
        "grouped_dx" if transposed else "grouped_forward",
        lambda rows, mats: [_dot(rows[0], mats[0][...], contract)],
        [x_PD],
        [w],
        sizes_E,
        transposed=transposed,
        outputs=1,
        tiles=tiles,
    )
    return out


def tgmm(x_PD: jax.Array, y_PF: jax.Array, sizes_E: jax.Array, *, tiles: Tiles | None = None) -> jax.Array:
    """out_EDF[e] = Σ_{p in e} x_PD[p]ᵀ y_PF[p], summed in float32; zero for a group without rows."""
    (out_EDF,) = _rows_by_rows("grouped_dw", lambda rows: rows, x_PD, [y_PF], sizes_E, outputs=1, tiles=tiles)
    return out_EDF


def gradients(
    x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, d_PF: jax.Array, *, tiles: Tiles | None = None
) -> tuple[jax.Array, jax.Array]:
    """The gradients in x and w of gmm, from that in its result."""
    return gmm(d_PF, w_EDF, sizes_E, transposed=True, tiles=tiles), tgmm(x_PD, d_PF, sizes_E, tiles=tiles)


def gated(
    x_PD: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    sizes_E: jax.Array,
    *,
    save: bool,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, ...]:
    """(silu(a) b,), a = x gate, b = x up, all [P, F]; with `save` also a and b, rounded to x's dtype."""

    def combine(rows, mats):
        a, b = (_dot(rows[0], m[...], (1, 0)) for m in mats)
        hidden = a * jax.nn.sigmoid(a) * b
        return [hidden, a, b] if save else [hidden]

    return _rows_by_matrices(
        "gated_forward",
        combine,
        [x_PD],
        [gate_EDF, up_EDF],
        sizes_E,
        transposed=False,
        outputs=3 if save else 1,
        tiles=tiles,
        exponentials=x_PD.shape[0] * gate_EDF.shape[2],
    )


def gated_gradients(
    x_PD: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    sizes_E: jax.Array,
    a_PF: jax.Array,
    b_PF: jax.Array,
    d_PF: jax.Array,
    *,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients in x, gate and up. Both kernels make those in a and b from d, a and b, and never write them."""

    def combine(rows, mats):
        da, db = gated_slopes(rows)
        return [_dot(da, mats[0][...], (1, 1)) + _dot(db, mats[1][...], (1, 1))]

    rows_in, exponentials = [d_PF, a_PF, b_PF], d_PF.size
    (dx_PD,) = _rows_by_matrices(
        "gated_dx",
        combine,
        rows_in,
        [gate_EDF, up_EDF],
        sizes_E,
        transposed=True,
        outputs=1,
        tiles=tiles,
        exponentials=exponentials,
    )
    dgate_EDF, dup_EDF = _rows_by_rows(
        "gated_dw", gated_slopes, x_PD, rows_in, sizes_E, outputs=2, tiles=tiles, exponentials=exponentials
    )
    return dx_PD, dgate_EDF, dup_EDF
