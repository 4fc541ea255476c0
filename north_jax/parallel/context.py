"""Context parallelism: one row over the c devices of the mesh axis "context", and what they tell each other.

A row of S tokens is cut into 2c chunks of L = S / 2c, and device i holds chunks i and 2c - 1 - i, one after the other
(zig-zag order). A query sees the keys before it, so every device has the same number of (query, key) pairs: an early
chunk with few, a late one with many. Arrays of a number per token ([B, S]: ids, segments, positions, log-probabilities)
stay in natural order and are turned by `to_zigzag` and `to_natural`; activations are born in zig-zag order and never
turned.

Keys and values travel, not queries: with 8 query heads to a key/value head they are the smaller part.

- A sliding layer fetches the h = min(window - 1, S - L) keys before each of its two chunks (`with_halo`). Those before a
  device's first chunk lie in its left neighbour's first one; those before its second in its right neighbour's second
  one, or on the last device in its own first. Where h > L, neighbours pass on what they got.
- A full layer gathers all keys and values of the row (`gathered`), and its device's queries see them in one call. A
  ring would send as many bytes. It could hide them behind the attention of each part, but between parts it reads and
  writes the partial result, which is float32 and larger than the keys of a part. Here the feed-forward branch of the
  same block, which needs no attention, is there to hide them, and the kernels skip the blocks that no query of the
  device sees. The price is room for the keys and values of one row: 2 KiB a token for North Mini Code in bfloat16.

Bytes that a device sends per layer, with B rows and G key/value heads of width K on the device, numbers of b bytes:

    sliding   4 h B G K b               whatever S is (the first and the last device send half of it)
    full      2 (1 - 1/c) S B G K b

for keys and values on the way forward and as many for their gradients on the way back. A layer that is computed again
in the backward pass (rematerialised) sends the forward bytes again.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

AXIS = "context"


def context_size() -> int:
    """Devices that share a row, by the mesh that is set where this is traced; 1 without one."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(AXIS, 1)


def chunk_length(S: int, c: int) -> int:
    """S / 2c, the tokens of a chunk. Raises ValueError when the row does not divide."""
    chunks = 2 * c
    if S % chunks:
        below = S // chunks * chunks
        near = f"{below} or {below + chunks}" if below else f"{chunks}"
        raise ValueError(
            f"a row of {S} tokens does not divide into the 2 x context = {chunks} chunks of mesh context={c}: make the"
            f" row length a multiple of {chunks}, such as {near}"
        )
    return S // chunks


def to_zigzag(x_BS: jax.Array) -> jax.Array:
    """Natural order along axis 1 -> zig-zag order, split over "context"; x itself where no devices share a row.

    Raises ValueError when the length does not divide into 2c chunks.
    """
    c = context_size()
    if c == 1:
        return x_BS
    L = chunk_length(x_BS.shape[1], c)
    x_BnL = _placed(x_BS, None).reshape(x_BS.shape[0], 2 * c, L, *x_BS.shape[2:])
    x_Bc2L = jnp.stack([x_BnL[:, :c], x_BnL[:, c:][:, ::-1]], axis=2)
    return _placed(x_Bc2L.reshape(x_BS.shape), AXIS)


def to_natural(x_BS: jax.Array) -> jax.Array:
    """The way back of `to_zigzag`: zig-zag order along axis 1 -> natural order."""
    c = context_size()
    return x_BS if c == 1 else _placed(_unzigzag(_placed(x_BS, None), c), AXIS)


def chunk_starts(S: int) -> jax.Array:
    """Under `on_shards`: the places in the row, [2] int32, at which the chunks of this device begin."""
    c, i = context_size(), jax.lax.axis_index(AXIS)
    return jnp.stack([i, 2 * c - 1 - i]) * chunk_length(S, c)


def halo_length(S: int, window: int) -> int:
    """h: the keys before a chunk that its queries may see, at most `window` - 1 and all before the last chunk."""
    return min(window - 1, S - chunk_length(S, context_size()))


def with_halo(x_BSGK: jax.Array, h: int) -> jax.Array:
    """Under `on_shards`: each of this device's two chunks after the h places before it, [B, 2, h + L, G, K].

    Before the row there are zeros.
    """
    B, S, *width = x_BSGK.shape
    x_B2LGK = x_BSGK.reshape(B, 2, S // 2, *width)
    pieces, before = [x_B2LGK], x_B2LGK
    while h > 0:
        # What is before the chunk before: the neighbours have it since the last turn.
        before = _chunk_before(before[:, :, -min(h, S // 2) :])
        pieces.insert(0, before)
        h -= before.shape[2]
    return jnp.concatenate(pieces, axis=2)


def gathered(x_BSGK: jax.Array) -> jax.Array:
    """Under `on_shards`: the whole rows of which every device holds its part, in natural order."""
    return _unzigzag(jax.lax.all_gather(x_BSGK, AXIS, axis=1, tiled=True), context_size())


def _chunk_before(x_B2L: jax.Array) -> jax.Array:
    """For what each chunk has, what the chunk before it has; zeros for the first."""
    c = context_size()
    up = jax.lax.ppermute(x_B2L[:, 0], AXIS, [(i, i + 1) for i in range(c - 1)])
    down = jax.lax.ppermute(x_B2L[:, 1], AXIS, [(i + 1, i) for i in range(c - 1)])
    # On the last device the row turns round: its second chunk follows its first.
    down = jnp.where(jax.lax.axis_index(AXIS) == c - 1, x_B2L[:, 0], down)
    return jnp.stack([up, down], axis=1)


def _unzigzag(x_BS: jax.Array, c: int) -> jax.Array:
    x_Bc2L = x_BS.reshape(x_BS.shape[0], c, 2, -1, *x_BS.shape[2:])
    return jnp.concatenate([x_Bc2L[:, :, 0], x_Bc2L[:, ::-1, 1]], axis=1).reshape(x_BS.shape)


def _placed(x_BS: jax.Array, axis: str | None) -> jax.Array:
    free = PartitionSpec.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(x_BS, PartitionSpec(free, axis, *[free] * (x_BS.ndim - 2)))
