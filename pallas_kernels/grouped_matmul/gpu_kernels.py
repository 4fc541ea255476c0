"""The two loops of the grouped products on Hopper: rows by matrices, and rows by rows. Pallas Mosaic GPU.

One block of threads per multiprocessor works through every `sms`-th item: a tile of the result. Its memory warpgroup
fetches the operands of this item and the next ones into a ring of shared memory while two compute warpgroups multiply
(wgmma, float32 sums in registers), each its own columns of the result.

wgmma multiplies 64 rows of its left operand at a time, and 64 is more than a group of 512 rows may waste. So in rows by
matrices the matrix is the left operand and rows are the right one, of which wgmma takes any multiple of 8: a tile is
computed transposed, over the rows that it has and less than a unit of 16 more. Tiles start where their group does (a
copy from global memory may start at any row), so no two write the same row. In rows by rows the rows are what is summed
over, in steps of 32, of which the last of a group is filled up with zeros.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.schedule import runs
from pallas_kernels.versions import load

# Copied and multiplied: rows of 128 bytes, swizzled, in groups of eight.
WIDE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
# Where rows are summed over, Mosaic takes as many at once as the swizzle has numbers: 32 of 64 bytes.
NARROW = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))
WARPGROUPS = 2
# Numbers along a row of either operand that one step of rows by matrices multiplies.
DEPTH = 64
# Columns of the result that a compute warpgroup holds: 128 x 128 float32 sums are 128 registers of a thread.
COLUMNS = 128
# Rows of a result that one copy to global memory takes.
SLAB = 32
COMPILER = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the kernels cut their work.

    sms: multiprocessors to fill (an H100 or H200 SXM has 132). rows: the most rows of a tile, a multiple of 32.
    unit: what is computed of a tile is a multiple of it, itself one of 16. stages: steps in shared memory at once.
    sum_rows, sum_stages: rows that a step of rows by rows sums over, a multiple of 32, and its stages. registers: of a
    compute and of a memory thread.
    """

    sms: int = 132
    rows: int = 128
    unit: int = 16
    stages: int = 3
    sum_rows: int = 32
    sum_stages: int = 6
    registers: tuple[int, int] = (232, 40)


def padded(x: jax.Array, rows: int = 8) -> jax.Array:
    """x [..., A, B] with A a multiple of 8, at least `rows`, and B a multiple of 128, by zeros.

    A copy from global memory may pass the end of an array, but is not larger than it, and takes tiles of 8 rows.
    """
    extra = [max(rows, -(-x.shape[-2] // 8) * 8) - x.shape[-2], -x.shape[-1] % 128]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, more) for more in extra]) if any(extra) else x


def _ring(stages: int, base: jax.Array) -> Callable:
    """The place in the ring of a step of an item, of which `base` steps came before."""
    return lambda step: lax.rem(base + step, jnp.int32(stages))


def _each_item(items: jax.Array, sms: int, work: Callable) -> jax.Array:
    """base = work(item, base) for this block's share of the items; base counts steps. Returns all of its steps."""
    block = lax.axis_index("sm")
    share = lax.div(items - block + sms - 1, jnp.int32(sms))
    return lax.fori_loop(0, share, lambda i, base: work(block + i * sms, base), jnp.int32(0))


def _fetch(base: jax.Array, steps: jax.Array, stages: int, free, copy: Callable) -> None:
    """copy(step, place) for every step, each once its place in the ring has been read."""
    place = _ring(stages, base)

    @pl.loop(0, steps)
    def fetch(step):
        @pl.when(base + step >= stages)
        def wait():
            plgpu.barrier_wait(free.at[place(step)])

        copy(step, place(step))


def _drain(stages: int, free, steps: jax.Array) -> None:
    """Waits until the last steps were read, so that no barrier is left half seen."""

    @pl.loop(jnp.maximum(steps - stages, 0), steps)
    def wait(step):
        plgpu.barrier_wait(free.at[lax.rem(step, jnp.int32(stages))])


def _sums(base, steps, stages: int, full, free, shapes, variants: Sequence[Callable], which=0) -> list[jax.Array]:
    """Sums [shape] over the steps of what variants[which](sums, place, step) issues: one wgmma for each sum.

    A step's place is given back one step late, when its products are known to be done.
    """
    place = _ring(stages, base)

    def scope(*sums):
        def loop(multiply: Callable) -> None:
            @pl.loop(0, steps)
            def body(step):
                plgpu.barrier_wait(full.at[place(step)])
                multiply(sums, place(step), step)
                plgpu.wgmma_wait(len(sums))

                @pl.when(step > 0)
                def release():
                    plgpu.barrier_arrive(free.at[place(step - 1)])

            plgpu.wgmma_wait(0)

        lax.switch(which, [functools.partial(loop, multiply) for multiply in variants])
        return [x[...] for x in sums]

    values = pl.run_scoped(scope, *[plgpu.ACC(shape, jnp.float32) for shape in shapes])

    @pl.when(steps > 0)
    def release():
        plgpu.barrier_arrive(free.at[place(steps - 1)])

    return values


def _store_rows(value: Callable, out, first, count, slabs, tail) -> None:
    """Columns i < count of a value [m, rows] to rows first + i of `out`; value(i, n) gives n of them from i on.

    The row after them is another group's. Swizzled shared memory is copied by whole slabs only; what is left goes by
    way of `tail`, which is not swizzled, one copy for each power of two in its rows.
    """
    for i in range(slabs.shape[0]):  # in parts, each of which wants registers beside the sums
        slabs.at[i].T[...] = value(i * SLAB, SLAB)
    full, rest = lax.div(count, jnp.int32(SLAB)), lax.rem(count, jnp.int32(SLAB))

    @pl.when(rest > 0)
    def unswizzle():
        layout = plgpu.Layout.SMEM_GMEM_COPY(tail.shape, tail.dtype, 128)
        tail[...] = load(slabs.at[full], layout)

    plgpu.commit_smem()

    @pl.loop(0, full)
    def copy_slab(i):
        plgpu.copy_smem_to_gmem(slabs.at[i], out.at[pl.ds(first + i * SLAB, SLAB)], commit_group=False)

    done = 0
    for bit in reversed(range(SLAB.bit_length() - 1)):
        size = 1 << bit

        @pl.when(rest & size != 0)
        def copy_rest(done=done, size=size):
            to = out.at[pl.ds(first + full * SLAB + done, size)]
            plgpu.copy_smem_to_gmem(tail.at[pl.ds(done, size)], to, commit_group=False)

        done += rest & size
    plgpu.commit_smem_to_gmem_group()


def _launch(kernel: Callable, name: str, tiles: Tiles, **types) -> Callable:
    return plgpu.kernel(
        kernel,
        **types,
        grid=(tiles.sms,),
        grid_names=("sm",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        kernel_name=name,
        compiler_params=COMPILER,
    )


def _roles(tiles: Tiles, compute: Callable, memory: Callable) -> None:
    wg = lax.axis_index("wg")

    @pl.when(wg < WARPGROUPS)
    def computes():
        plgpu.set_max_registers(tiles.registers[0], action="increase")
        compute(wg)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == WARPGROUPS)
    def fetches():
        plgpu.set_max_registers(tiles.registers[1], action="decrease")
        memory()


def rows_by_matrices(
    name: str,
    combine: Callable,
    rows_in: Sequence[jax.Array],
    matrices: Sequence[jax.Array],
    sizes_E: jax.Array,
    *,
    transposed: bool,
    outputs: int,
    tiles: Tiles,
) -> list[jax.Array]:
    """Arrays [P, width] of combine(sums); rows that belong to no group take combine(zeros), which must be zeros.

    sums: rows times each of the matrices of their group, or where there are as many arrays of rows as matrices, the
    sum of their products. `width` is the last dimension of the matrices, [E, K, width], or `transposed` the one before
    it, [E, width, K].
    """
    (P, K), (E, *_) = rows_in[0].shape, matrices[0].shape
    width = matrices[0].shape[1 if transposed else 2]
    held = len(matrices) // len(rows_in)
    m, unit, stages = COLUMNS // held, tiles.unit, tiles.stages
    rows_in = [padded(x, tiles.rows) for x in rows_in]
    matrices = [padded(w, COLUMNS if transposed else DEPTH) for w in matrices]
    each, blocks = pl.cdiv(K, DEPTH), pl.cdiv(width, WARPGROUPS * m)

    def kernel(*refs):
        group_G, first_G, count_G, visits_ref, *refs = refs
        ins, mats, refs = refs[: len(rows_in)], refs[len(rows_in) :][: len(matrices)], refs[len(rows_in + matrices) :]
        outs, (w_smem, x_smem, out_smem, tail_smem, full, free) = refs[:outputs], refs[outputs:]

        def described(item):
            visit, block = lax.div(item, jnp.int32(blocks)), lax.rem(item, jnp.int32(blocks))
            return group_G[visit], first_G[visit], count_G[visit], block * (WARPGROUPS * m)

        def compute(wg):
            def multiply(n, sums, place, step):
                for i, total in enumerate(sums):
                    left = w_smem.at[place, wg, i]
                    plgpu.wgmma(
                        total.at[:, pl.ds(0, n)], left if transposed else left.T, x_smem.at[place, pl.ds(0, n)].T
                    )

            variants = [functools.partial(multiply, n) for n in range(unit, tiles.rows + 1, unit)]

            def work(item, base):
                group, first, count, column = described(item)
                steps = jnp.where(group < E, len(rows_in) * each, 0)
                which = lax.div(count - 1, jnp.int32(unit))
                sums = _sums(base, steps, stages, full, free, [(m, tiles.rows)] * held, variants, which)
                for i, out in enumerate(outs):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                    def value(start, size, i=i, dtype=out.dtype):
                        part = combine([lax.slice(x, (0, start), (m, start + size)) for x in sums])[i]
                        return plgpu.layout_cast(part.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)

                    to = out.at[:, pl.ds(column + wg * m, m)]
                    _store_rows(value, to, first, count, out_smem.at[wg], tail_smem.at[wg])
                return base + steps

            _each_item(visits_ref[0] * blocks, tiles.sms, work)

        def memory():
            def work(item, base):
                group, first, _, column = described(item)
                for i, x_ref in enumerate(ins):
                    steps = jnp.where(group < E, each, 0)

                    def copy(step, place, x_ref=x_ref, mine=mats[i * held : (i + 1) * held]):
                        deep = pl.ds(step * DEPTH, DEPTH)
                        plgpu.copy_gmem_to_smem(
                            x_ref.at[pl.ds(first, tiles.rows), deep], x_smem.at[place], full.at[place]
                        )
                        for wg in range(WARPGROUPS):
                            wide = pl.ds(column + wg * m, m)
                            at = (group, wide, deep) if transposed else (group, deep, wide)
                            for j, w_ref in enumerate(mine):
                                plgpu.copy_gmem_to_smem(w_ref.at[at], w_smem.at[place, wg, j], full.at[place])

                    _fetch(base, steps, stages, free, copy)
                    base += steps
                return base

            _drain(stages, free, _each_item(visits_ref[0] * blocks, tiles.sms, work))

        _roles(tiles, compute, memory)

    dtype = rows_in[0].dtype
    wide = matrices[0].shape[1 if transposed else 2]
    results = _launch(
        kernel, name, tiles,
        out_type=[jax.ShapeDtypeStruct((-(-P // 8) * 8, -(-wide // 128) * 128), dtype)] * outputs,
        scratch_types=(
            plgpu.SMEM((stages, WARPGROUPS, held, *((m, DEPTH) if transposed else (DEPTH, m))), dtype, transforms=WIDE),
            plgpu.SMEM((stages, tiles.rows, DEPTH), dtype, transforms=WIDE),
            plgpu.SMEM((WARPGROUPS, tiles.rows // SLAB, SLAB, m), dtype, transforms=WIDE),
            plgpu.SMEM((WARPGROUPS, SLAB, m), dtype),
            plgpu.Barrier(num_arrivals=1 + WARPGROUPS * held, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        ),
    )(*runs(sizes_E, P, tiles.rows, unit), *rows_in, *matrices)  # fmt: skip
    return [out[:P, :width] for out in results]


def rows_by_rows(x_PD: jax.Array, y_PF: jax.Array, sizes_E: jax.Array, *, tiles: Tiles) -> jax.Array:
    """out_EDF[e] = sum over the rows p of e of x_PD[p]^T y_PF[p]; zero for a group without rows."""
    (P, D), F, E = x_PD.shape, y_PF.shape[1], len(sizes_E)
    x_PD, y_PF = (padded(x, tiles.sum_rows) for x in (x_PD, y_PF))
    rows, stages, m, n = tiles.sum_rows, tiles.sum_stages, COLUMNS, COLUMNS
    down, across = pl.cdiv(D, WARPGROUPS * m), pl.cdiv(F, n)
    end_E = jnp.minimum(jnp.cumsum(sizes_E.astype(jnp.int32)), P)
    start_E = jnp.append(jnp.int32(0), end_E[:-1])

    def kernel(start_ref, end_ref, x_ref, y_ref, out_ref, x_smem, y_smem, out_smem, full, free, clean):
        def described(item):
            group, tile = lax.div(item, jnp.int32(down * across)), lax.rem(item, jnp.int32(down * across))
            start, count = start_ref[group], end_ref[group] - start_ref[group]
            row, column = lax.div(tile, jnp.int32(across)) * (WARPGROUPS * m), lax.rem(tile, jnp.int32(across)) * n
            return group, start, count, lax.div(count + rows - 1, jnp.int32(rows)), row, column

        def keep(ref, count):
            """Zeros in the rows from `count` on: the next group's, or nobody's, which may be NaN."""
            layout = plgpu.Layout.SMEM_GMEM_COPY(ref.shape, ref.dtype, 64)
            row = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=layout)
            ref[...] = jnp.where(row < count, load(ref, layout), jnp.zeros((), ref.dtype))

        def compute(wg):
            def work(item, base):
                group, _, count, steps, row, column = described(item)

                def multiply(sums, place, step):
                    @pl.when((step + 1) * rows > count)
                    def clear():
                        keep(x_smem.at[place, wg], count - step * rows)

                        @pl.when(wg == 0)
                        def shared():
                            keep(y_smem.at[place], count - step * rows)

                        plgpu.commit_smem()
                        # Of every place its own barrier, so that warpgroup 0 cannot pass the other twice.
                        plgpu.barrier_arrive(clean.at[place])
                        plgpu.barrier_wait(clean.at[place])

                    plgpu.wgmma(sums[0], x_smem.at[place, wg].T, y_smem.at[place])

                (total,) = _sums(base, steps, stages, full, free, [(m, n)], [multiply])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem[wg] = total.astype(out_ref.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem.at[wg], out_ref.at[group, pl.ds(row + wg * m, m), pl.ds(column, n)])
                return base + steps

            _each_item(jnp.int32(E * down * across), tiles.sms, work)

        def memory():
            def work(item, base):
                _, start, _, steps, row, column = described(item)

                def copy(step, place):
                    run = pl.ds(start + step * rows, rows)
                    plgpu.copy_gmem_to_smem(y_ref.at[run, pl.ds(column, n)], y_smem.at[place], full.at[place])
                    for wg in range(WARPGROUPS):
                        wide = pl.ds(row + wg * m, m)
                        plgpu.copy_gmem_to_smem(x_ref.at[run, wide], x_smem.at[place, wg], full.at[place])

                _fetch(base, steps, stages, free, copy)
                return base + steps

            _drain(stages, free, _each_item(jnp.int32(E * down * across), tiles.sms, work))

        _roles(tiles, compute, memory)

    dtype = x_PD.dtype
    out_EDF = _launch(
        kernel, "grouped_rows_by_rows", tiles,
        out_type=jax.ShapeDtypeStruct((E, x_PD.shape[1], y_PF.shape[1]), dtype),
        scratch_types=(
            plgpu.SMEM((stages, WARPGROUPS, rows, m), dtype, transforms=NARROW),
            plgpu.SMEM((stages, rows, n), dtype, transforms=NARROW),
            plgpu.SMEM((WARPGROUPS, m, n), dtype, transforms=WIDE),
            plgpu.Barrier(num_arrivals=1 + WARPGROUPS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        ),
    )(start_E, end_E, x_PD, y_PF)  # fmt: skip
    return out_EDF[:, :D, :F]
