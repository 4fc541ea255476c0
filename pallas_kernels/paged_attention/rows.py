"""What the kernel knows of each row before it starts: which keys, in which blocks, and which row comes next."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.blocks import query_bounds

# The columns of `schedule`, and how many they are.
LOW, HIGH, FIRST, END, WHOLE_FIRST, WHOLE_END, STEP, NEXT, COLUMNS = range(9)


def schedule(start_BS: jax.Array, end_BS: jax.Array, T: int, block: int, chains: int) -> jax.Array:
    """[B, 8] int32. LOW … HIGH: the keys that any query of the row sees; FIRST … END: the blocks they lie in;
    WHOLE_FIRST … WHOLE_END: blocks that all its queries see whole. All half-open, HIGH at most T.

    The B / `chains` rows of a chain are walked one after the other as one line of blocks. STEP: blocks of the chain
    before the row; NEXT: the next row of the chain with any, B if there is none.
    """
    B = start_BS.shape[0]
    start_BS, end_BS = jnp.clip(start_BS, 0, T), jnp.clip(end_BS, 0, T)
    sees_BS = start_BS < end_BS
    high_B = jnp.max(jnp.where(sees_BS, end_BS, 0), axis=1)
    low_B = jnp.minimum(jnp.min(jnp.where(sees_BS, start_BS, T), axis=1), high_B)
    bounds_B4 = query_bounds(start_BS, end_BS, T, start_BS.shape[1], block)[:, 0]
    first_B = jnp.where(high_B > 0, bounds_B4[:, 0], 0)
    end_B = jnp.where(high_B > 0, bounds_B4[:, 1], 0)
    count_CR = (end_B - first_B).reshape(chains, -1)
    step_B = (jnp.cumsum(count_CR, axis=1) - count_CR).reshape(-1)
    row_CR = jnp.arange(B).reshape(chains, -1)
    some_CR = jnp.where(count_CR > 0, row_CR, B)
    from_here_CR = jax.lax.cummin(some_CR, axis=1, reverse=True)
    next_B = jnp.pad(from_here_CR[:, 1:], ((0, 0), (0, 1)), constant_values=B).reshape(-1)
    columns = (low_B, high_B, first_B, end_B, bounds_B4[:, 2], bounds_B4[:, 3], step_B, next_B)
    return jnp.stack(columns, axis=1).astype(jnp.int32)
