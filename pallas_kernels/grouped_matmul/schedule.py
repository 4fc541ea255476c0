"""Which rows of which tile each step multiplies by which group's matrix, from sizes known only at run time."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def unit_rows(dtype: jnp.dtype) -> int:
    """The rows of one register, below which no slice may start: 8 of 4 bytes, 16 of 2."""
    return 32 // jnp.dtype(dtype).itemsize


def _steps(visits: jax.Array, G: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """group_G, nth_G, real_G: step g is the nth visit of its group; steps past the last visit repeat it, not real."""
    done = jnp.cumsum(visits)
    step_G = jnp.arange(G, dtype=jnp.int32)
    last_G = jnp.minimum(step_G, done[-1] - 1)
    group_G = jnp.sum(done[:-1, None] <= last_G, axis=0, dtype=jnp.int32)  # the groups done by then
    return group_G, last_G - _of(done - visits, group_G), step_G == last_G


def _of(value_E: jax.Array, group_G: jax.Array) -> jax.Array:
    # value_E[group_G] as a compare and a sum: a TPU's gathers go number by number, and each is a program of its own.
    return jnp.sum(jnp.where(group_G == jnp.arange(len(value_E))[:, None], value_E[:, None], 0), axis=0)


def schedule(sizes_E: jax.Array, P: int, rows: int, *, empty: bool) -> tuple[jax.Array, ...]:
    """group_G, tile_G, low_G, high_G: step g multiplies rows low to high of its tile by its group's matrix.

    With `empty`, groups without rows are visited once, for their zeros to be written; else rows past the sum of the
    sizes are visited without work (low = high) under the last group, for theirs. G is static: each step moves to the
    next tile, the next group or both. Steps past the last visit repeat it without work.
    """
    tiles = pl.cdiv(P, rows)
    ends = jnp.minimum(jnp.cumsum(sizes_E.astype(jnp.int32)), P)
    if not empty:
        ends = jnp.append(ends, P)
    starts = jnp.append(0, ends[:-1])
    visits = jnp.where(ends > starts, (ends - 1) // rows - starts // rows + 1, int(empty))
    group_G, nth_G, real_G = _steps(visits, tiles + len(ends) - 1)
    tile_G = _of(jnp.minimum(starts // rows, tiles - 1), group_G) + nth_G
    works_G = real_G & (group_G < len(sizes_E))
    low_G = jnp.where(works_G, jnp.maximum(_of(starts, group_G) - tile_G * rows, 0), 0)
    high_G = jnp.where(works_G, jnp.minimum(_of(ends, group_G) - tile_G * rows, rows), 0)
    group_G = jnp.minimum(group_G, len(sizes_E) - 1)
    return tuple(x.astype(jnp.int32) for x in (group_G, tile_G, low_G, high_G))


def runs(sizes_E: jax.Array, P: int, rows: int, unit: int) -> tuple[jax.Array, ...]:
    """group_G, first_G, count_G, and how many of the G steps are real: [1]. Of each group, its rows in even parts.

    Step g has rows first to first + count - 1, all of its group; rows past the sum of the sizes are group E. A group
    takes as few steps of at most `rows` as it can, each a multiple of `unit` (which divides `rows`) but its last.
    G is static. For kernels that may start a tile at any row: only a group's last unit is filled up.
    """
    ends = jnp.append(jnp.minimum(jnp.cumsum(sizes_E.astype(jnp.int32)), P), P)
    starts = jnp.append(0, ends[:-1])
    units, visits = pl.cdiv(ends - starts, unit), pl.cdiv(ends - starts, rows)
    group_G, nth_G, real_G = _steps(visits, pl.cdiv(P, rows) + len(sizes_E))
    even, more = units // jnp.maximum(visits, 1), units % jnp.maximum(visits, 1)

    def row(nth_G: jax.Array) -> jax.Array:
        start_G = _of(starts, group_G) + unit * (nth_G * _of(even, group_G) + jnp.minimum(nth_G, _of(more, group_G)))
        return jnp.minimum(start_G, _of(ends, group_G))

    first_G = row(nth_G)
    count_G = jnp.where(real_G, row(nth_G + 1) - first_G, 0)
    return tuple(x.astype(jnp.int32) for x in (group_G, first_G, count_G, jnp.sum(visits, keepdims=True)))


def first_row(low: jax.Array, unit: int) -> jax.Array:
    """The first row of the unit that holds row `low`."""
    return low & -unit


def computed_rows(low: jax.Array, high: jax.Array, unit: int) -> jax.Array:
    """The rows that a visit multiplies: its own, low to high, and what else their first and last units hold."""
    return jnp.where(high > low, first_row(high + unit - 1, unit) - first_row(low, unit), 0)
