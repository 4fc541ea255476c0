"""Which key blocks a query block needs, from the spans of its queries; shared by the kernels of all chips."""

import jax
import jax.numpy as jnp


def query_bounds(start_BS: jax.Array, end_BS: jax.Array, T: int, q: int, k: int) -> jax.Array:
    """[B, S / q, 4] int32: per block of q queries (first, end, full_first, full_end), half-open, in blocks of k keys.

    Blocks of first … end are all that any of its queries sees; those in full_first … full_end too are seen whole by all
    of them. `end_BS` is at most T where the keys beyond T are padding. Nothing is assumed of the spans' order.
    """
    B, S = start_BS.shape
    start_BS, end_BS = jnp.clip(start_BS, 0, T), jnp.clip(end_BS, 0, T)
    sees_BS = start_BS < end_BS

    def blocks(x_BS: jax.Array) -> jax.Array:
        return x_BS.reshape(B, S // q, q)

    first_Bn = jnp.min(blocks(jnp.where(sees_BS, start_BS, T)), axis=-1) // k
    end_Bn = -(-jnp.max(blocks(jnp.where(sees_BS, end_BS, 0)), axis=-1) // k)
    full_first_Bn = -(-jnp.max(blocks(jnp.where(sees_BS, start_BS, T)), axis=-1) // k)
    full_end_Bn = jnp.min(blocks(jnp.where(sees_BS, end_BS, 0)), axis=-1) // k
    bounds = jnp.stack([first_Bn, jnp.maximum(end_Bn, first_Bn), full_first_Bn, full_end_Bn], axis=-1)
    return bounds.astype(jnp.int32)


def key_bounds(bounds_Bn4: jax.Array, blocks: int) -> jax.Array:
    """[B, blocks, 4] int32: `query_bounds` seen from the keys, (first, end, full_first, full_end) in blocks of queries.

    Query blocks first … end are all whose bounds hold the key block; those in full_first … full_end too see it whole
    (all of them, where these lie side by side, as they do unless spans go back and forth).
    """
    n = bounds_Bn4.shape[1]
    i_n1, j_m = jnp.arange(n)[:, None], jnp.arange(blocks)

    def held(first: int, end: int) -> tuple[jax.Array, jax.Array]:
        """Which pairs of blocks lie in these bounds, and the first query block of each key block (0: there is none)."""
        held_Bnm = (bounds_Bn4[:, :, first, None] <= j_m) & (j_m < bounds_Bn4[:, :, end, None])
        return held_Bnm, jnp.argmax(held_Bnm, axis=1)

    held_Bnm, first_Bm = held(0, 1)
    end_Bm = jnp.max(jnp.where(held_Bnm, i_n1 + 1, 0), axis=1)
    whole_Bnm, full_first_Bm = held(2, 3)
    ended_Bnm = jnp.logical_not(whole_Bnm) & (i_n1 >= full_first_Bm[:, None])
    full_end_Bm = jnp.where(jnp.any(ended_Bnm, axis=1), jnp.argmax(ended_Bnm, axis=1), n)
    return jnp.stack([first_Bm, end_Bm, full_first_Bm, full_end_Bm], axis=-1).astype(jnp.int32)
