"""Which rows of which tile each step multiplies by which group's matrix, from sizes known only at run time."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def unit_rows(dtype: jnp.dtype) -> int:
    """The rows of one register, below which no slice may start: 8 of 4 bytes, 16 of 2."""
    return 32 // jnp.dtype(dtype).itemsize


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
    done = jnp.cumsum(visits)
    step_G = jnp.arange(tiles + len(ends) - 1, dtype=jnp.int32)
    real_G = jnp.minimum(step_G, done[-1] - 1)
    # The group of a step is the number of groups done by then: one scatter of E ones, one running sum over G.
    begun_G = jnp.zeros_like(step_G).at[done[:-1]].add(1, mode="drop")
    group_G = jnp.cumsum(begun_G)[real_G]
    tile_G = jnp.minimum(starts // rows, tiles - 1)[group_G] + real_G - (done - visits)[group_G]
    works_G = (step_G == real_G) & (group_G < len(sizes_E))
    low_G = jnp.where(works_G, jnp.maximum(starts[group_G] - tile_G * rows, 0), 0)
    high_G = jnp.where(works_G, jnp.minimum(ends[group_G] - tile_G * rows, rows), 0)
    group_G = jnp.minimum(group_G, len(sizes_E) - 1)
    return tuple(x.astype(jnp.int32) for x in (group_G, tile_G, low_G, high_G))


def first_row(low: jax.Array, unit: int) -> jax.Array:
    """The first row of the unit that holds row `low`."""
    return low & -unit


def computed_rows(low: jax.Array, high: jax.Array, unit: int) -> jax.Array:
    """The rows that a visit multiplies: its own, low to high, and what else their first and last units hold."""
    return jnp.where(high > low, first_row(high + unit - 1, unit) - first_row(low, unit), 0)
