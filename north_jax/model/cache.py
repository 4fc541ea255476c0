"""Keys and values in pages of P consecutive tokens; tables say which pages a row's tokens lie in.

Sliding layers have a pool of pages of their own: what has left a row's window can be given to another row, so that
they hold a window's worth per row, however long it grows.
"""

import dataclasses

import jax
import jax.numpy as jnp

from north_jax.model import attention
from north_jax.model.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Per layer keys and values [G, X pages, P, K]: the pages of a head are gathered in whole pieces, in order.

    Nothing needs clearing when a page is used again: a query sees only tokens up to its own position, and those have
    been written by then.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.v[0].shape[2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """Row b's tokens from position w * P on lie in page `full_BW[b, w]` of the full layers, and those from
    (first_B[b] + w) * P on in page `sliding_BW[b, w]` of the sliding ones. Entries that no token of the step needs may
    hold anything that is a page.
    """

    full_BW: jax.Array
    sliding_BW: jax.Array
    first_B: jax.Array


def init_cache(
    config: ModelConfig, pages: int, page_size: int, *, sliding_pages: int | None = None, dtype=jnp.float32
) -> Cache:
    """An empty cache of `pages` pages in full layers and as many, or `sliding_pages`, in sliding ones."""
    G, K, P = config.num_key_value_heads, config.head_dim, page_size
    sizes = [
        sliding_pages if config.is_sliding(i) and sliding_pages is not None else pages
        for i in range(config.num_hidden_layers)
    ]
    return Cache(
        k=tuple(jnp.zeros((G, X, P, K), dtype) for X in sizes),
        v=tuple(jnp.zeros((G, X, P, K), dtype) for X in sizes),
    )


def own_pages(rows: int, length: int, page_size: int) -> Tables:
    """Tables that give every row pages of its own for `length` tokens: rows * ceil(length / page_size) in all."""
    W = -(-length // page_size)
    pages_BW = jnp.arange(rows * W, dtype=jnp.int32).reshape(rows, W)
    return Tables(full_BW=pages_BW, sliding_BW=pages_BW, first_B=jnp.zeros(rows, jnp.int32))


@dataclasses.dataclass(frozen=True)
class View:
    """Where the tokens of a step go in a kind of layers, what its queries read there, and which of that they see.

    Tokens at a negative position have a page beyond every pool: they are dropped.
    """

    table_BW: jax.Array
    page_BS: jax.Array
    offset_BS: jax.Array
    mask_BST: jax.Array


def views(tables: Tables, positions_BS: jax.Array, page_size: int, window: int) -> tuple[View, View]:
    """The views of (full, sliding) layers for queries at `positions_BS`."""

    def view(table_BW: jax.Array, first_B: jax.Array, reach: int | None) -> View:
        W = table_BW.shape[1]
        index_BS = positions_BS // page_size - first_B[:, None]
        page_BS = jnp.take_along_axis(table_BW, jnp.clip(index_BS, 0, W - 1), axis=1)
        held_BS = (positions_BS >= 0) & (index_BS >= 0) & (index_BS < W)
        back_BST = (positions_BS - first_B[:, None] * page_size)[:, :, None] - jnp.arange(W * page_size)
        mask_BST = back_BST >= 0 if reach is None else (back_BST >= 0) & (back_BST < reach)
        nowhere = jnp.iinfo(jnp.int32).max
        return View(table_BW, jnp.where(held_BS, page_BS, nowhere), positions_BS % page_size, mask_BST)

    full = view(tables.full_BW, jnp.zeros_like(tables.first_B), None)
    return full, view(tables.sliding_BW, tables.first_B, window)


def write(pages_GXPK: jax.Array, new_BSGK: jax.Array, view: View) -> jax.Array:
    """The pages of one layer with the new keys, or values, in their places; in place under donation."""
    new_GBSK = new_BSGK.transpose(2, 0, 1, 3).astype(pages_GXPK.dtype)
    return pages_GXPK.at[:, view.page_BS, view.offset_BS].set(new_GBSK, mode="drop")


def attend(q_BSHK: jax.Array, k_GXPK: jax.Array, v_GXPK: jax.Array, view: View) -> jax.Array:
    """Attention of every row over what it sees of its pages -> [B, S, H, K]."""

    def gather(pages_GXPK: jax.Array) -> jax.Array:
        G, _, P, K = pages_GXPK.shape
        B, W = view.table_BW.shape
        return pages_GXPK[:, view.table_BW].reshape(G, B, W * P, K).astype(q_BSHK.dtype)

    return attention.attend(q_BSHK, gather(k_GXPK), gather(v_GXPK), view.mask_BST)
