"""Keys and values of the tokens a slot has seen: entry t of a slot belongs to the token at position t."""

import dataclasses

import jax
import jax.numpy as jnp

from north_jax.model import attention
from north_jax.model.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Per layer keys [B slots, G, K, T positions] and values [B, G, T, K]; the orders that attention multiplies.

    Nothing needs clearing when a slot is used again: a query sees only entries up to its own position, and those have
    been written by then.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]

    @property
    def slots(self) -> int:
        """Number of sequences held."""
        return self.v[0].shape[0]

    @property
    def length(self) -> int:
        """Number of positions held per slot."""
        return self.v[0].shape[2]


def init_cache(config: ModelConfig, slots: int, length: int, dtype=jnp.float32) -> Cache:
    """An empty cache for `slots` sequences of up to `length` tokens."""
    B, G, K, T = slots, config.num_key_value_heads, config.head_dim, length
    layers = range(config.num_hidden_layers)
    return Cache(
        k=tuple(jnp.zeros((B, G, K, T), dtype) for _ in layers),
        v=tuple(jnp.zeros((B, G, T, K), dtype) for _ in layers),
    )


def write(
    k_BGKT: jax.Array,
    v_BGTK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    slots_B: jax.Array,
    positions_BS: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The cache of one layer with row b of the new keys and values in slot `slots_B[b]` at its positions.

    In place under donation. Tokens at a negative position or past the end are dropped.
    """
    # Negative indices would wrap around; past the end they are dropped.
    index_BS = jnp.where(positions_BS < 0, v_BGTK.shape[2], positions_BS)
    rows_B1 = slots_B[:, None]
    return (
        k_BGKT.at[rows_B1, :, :, index_BS].set(k_BSGK.astype(k_BGKT.dtype), mode="drop"),
        v_BGTK.at[rows_B1, :, index_BS].set(v_BSGK.astype(v_BGTK.dtype), mode="drop"),
    )


@dataclasses.dataclass(frozen=True)
class View:
    """The `T` entries from `start_B` on (None: from 0) that the queries of a step read, and which of them they see."""

    T: int
    start_B: jax.Array | None
    mask_BST: jax.Array


def views(positions_BS: jax.Array, length: int, window: int) -> tuple[View, View]:
    """What (full, sliding) layers read for queries at `positions_BS`, consecutive within a row.

    Full layers read the first `length` entries; sliding layers only those that some query of the row can see.
    """
    back_BST = positions_BS[:, :, None] - jnp.arange(length)
    full = View(length, None, back_BST >= 0)
    T = window + positions_BS.shape[1] - 1
    if length <= T:
        return full, View(length, None, full.mask_BST & (back_BST < window))
    start_B = jnp.clip(jnp.max(positions_BS, axis=1) + 1 - T, 0, length - T)
    back_BST = positions_BS[:, :, None] - start_B[:, None, None] - jnp.arange(T)
    return full, View(T, start_B, (back_BST >= 0) & (back_BST < window))


def attend(q_BSHK: jax.Array, k_BGKT: jax.Array, v_BGTK: jax.Array, slots_B: jax.Array | None, view: View) -> jax.Array:
    """Attention of row b over what it sees of slot b (or `slots_B[b]`) -> [B, S, H, K]."""
    T, start_B = view.T, view.start_B
    if start_B is None:
        k_BGKT, v_BGTK = k_BGKT[..., :T], v_BGTK[:, :, :T]
        if slots_B is not None:
            k_BGKT, v_BGTK = k_BGKT[slots_B], v_BGTK[slots_B]
    else:
        G, K = v_BGTK.shape[1], v_BGTK.shape[3]
        rows_B = jnp.arange(q_BSHK.shape[0]) if slots_B is None else slots_B
        k_BGKT, v_BGTK = jax.vmap(
            lambda slot, start: (
                jax.lax.dynamic_slice(k_BGKT, (slot, 0, 0, start), (1, G, K, T))[0],
                jax.lax.dynamic_slice(v_BGTK, (slot, 0, start, 0), (1, G, T, K))[0],
            )
        )(rows_B, start_B)
    return attention.attend(q_BSHK, k_BGKT, v_BGTK, view.mask_BST)
