"""Context parallelism: a row over the c devices of the mesh axis "context", and what they tell each other.

A row of S tokens is cut into 2c chunks of L = S / 2c, and device i holds chunks i and 2c - 1 - i, one after the other
(zig-zag order). A query sees the keys before it, so every device has the same number of (query, key) pairs: an early
chunk with few, a late one with many. Arrays of a number per token ([B, S]: ids, segments, positions, log-probabilities)
stay in natural order and are turned by `to_zigzag` and `to_natural`; activations are born in zig-zag order and never
turned.

Keys and values travel, not queries: with 8 query heads to a key/value head they are the smaller part.

- A sliding layer fetches the h = min(window - 1, S - L) keys before each of its two chunks (`with_halo`). Those before
  a device's first chunk lie in its left neighbour's first one; those before its second in its right neighbour's second
  one, or on the last device in its own first. Where h > L, neighbours pass on what they got.
- A full layer gathers all keys and values of the row (`gathered`), and its device's queries see them in one call. A
  ring would send as many bytes. It could hide them behind the attention of each part, but between parts it reads and
  writes the partial result, which is float32 and larger than the keys of a part. Here the feed-forward branch of the
  same block, which needs no attention, is there to hide them, and the kernels skip the blocks that no query of the
  device sees. The price is room for the keys and values of one row: 2 KiB a token for North Mini Code in bfloat16.

Bytes that a device sends per layer, with B rows and G key/value heads of width K on the device, numbers of b bytes:

    sliding   4 h B G K b               whatever S is (the first and the last device send half of it)
    full      2 (1 - 1/c) S B G K b

for keys and values on the way forward and as many for their gradients on the way back: 17 MB and 235 MB for North Mini
Code in bfloat16, a row of 131,072 tokens on 8 devices. A layer that is computed again in the backward pass
(rematerialised) sends the forward bytes again.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from north_jax.parallel.sharding import RULES

(AXIS,) = RULES["sequence"]


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


def whole_rows(x_BS: jax.Array) -> jax.Array:
    """x with every row whole on each of the devices that share it: what is cheap to repeat rather than to exchange."""
    free = PartitionSpec.UNCONSTRAINED
    return x_BS if context_size() == 1 else jax.lax.with_sharding_constraint(x_BS, PartitionSpec(free, None))


def to_zigzag(x_BS: jax.Array) -> jax.Array:
    """Natural order along axis 1 -> zig-zag order, split over "context"; x itself where no devices share a row.

    Raises ValueError when the length does not divide into 2c chunks.
    """
    c, S = context_size(), x_BS.shape[1]
    if c == 1:
        return x_BS
    L = chunk_length(S, c)

    def own(x_BS: jax.Array) -> jax.Array:
        chunks = [jax.lax.dynamic_slice_in_dim(x_BS, start, L, axis=1) for start in chunk_starts(S)]
        return jnp.concatenate(chunks, axis=1)

    return _on_parts(own, None)(x_BS)


def to_natural(x_BS: jax.Array) -> jax.Array:
    """The way back of `to_zigzag`: zig-zag order along axis 1 -> natural order."""

    def own(x_BS: jax.Array) -> jax.Array:
        part = x_BS.shape[1]
        return jax.lax.dynamic_slice_in_dim(gathered(x_BS), jax.lax.axis_index(AXIS) * part, part, axis=1)

    return x_BS if context_size() == 1 else _on_parts(own, AXIS)(x_BS)


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
    c = context_size()
    x_BSGK = jax.lax.all_gather(x_BSGK, AXIS, axis=1, tiled=True)
    x_Bc2LGK = x_BSGK.reshape(x_BSGK.shape[0], c, 2, -1, *x_BSGK.shape[2:])
    return jnp.concatenate([x_Bc2LGK[:, :, 0], x_Bc2LGK[:, ::-1, 1]], axis=1).reshape(x_BSGK.shape)


def _chunk_before(x_B2L: jax.Array) -> jax.Array:
    """For what each chunk has, what the chunk before it has; zeros for the first."""
    c = context_size()
    up = jax.lax.ppermute(x_B2L[:, 0], AXIS, [(i, i + 1) for i in range(c - 1)])
    down = jax.lax.ppermute(x_B2L[:, 1], AXIS, [(i + 1, i) for i in range(c - 1)])
    # On the last device the row turns round: its second chunk follows its first.
    down = jnp.where(jax.lax.axis_index(AXIS) == c - 1, x_B2L[:, 0], down)
    return jnp.stack([up, down], axis=1)


def _on_parts(function, axis: str | None):
    """`function` of [B, S] arrays split over this axis, to ones split over "context"; other mesh axes as they come."""
    parts = PartitionSpec(None, axis), PartitionSpec(None, AXIS)
    return jax.shard_map(function, in_specs=parts[:1], out_specs=parts[1], axis_names={AXIS})
