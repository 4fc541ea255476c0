"""Keys and values in pages of P consecutive tokens; tables say which pages a row's tokens lie in.

Sliding layers have a pool of pages of their own: what has left a row's window can be given to another row, so that
they hold a window's worth per row, however long it grows.
"""

import dataclasses

import jax
import jax.numpy as jnp

from north_jax.model.config import ModelConfig
from pallas_kernels.paged_attention import paged_attention


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

    def views(self, tables: "Tables", positions_BS: jax.Array, window: int) -> tuple["View", "View"]:
        """The views of (full, sliding) layers for queries at `positions_BS`."""

        def view(table_BW: jax.Array, first_B: jax.Array, reach: int | None) -> View:
            W = table_BW.shape[1]
            index_BS = positions_BS // self.page_size - first_B[:, None]
            page_BS = jnp.take_along_axis(table_BW, jnp.clip(index_BS, 0, W - 1), axis=1)
            held_BS = (positions_BS >= 0) & (index_BS >= 0) & (index_BS < W)
            end_BS = positions_BS - first_B[:, None] * self.page_size + 1
            start_BS = jnp.zeros_like(end_BS) if reach is None else end_BS - reach
            nowhere = jnp.iinfo(jnp.int32).max
            return View(table_BW, jnp.where(held_BS, page_BS, nowhere), positions_BS % self.page_size, start_BS, end_BS)

        full = view(tables.full_BW, jnp.zeros_like(tables.first_B), None)
        return full, view(tables.sliding_BW, tables.first_B, window)

    def attend(self, i: int, q_BSHK, k_BSGK, v_BSGK, view: "View", backend: str) -> tuple[jax.Array, ...]:
        """(heads_BSHK, k, v): attention in layer i, and its keys and values with the new tokens'."""
        k_GXPK, v_GXPK = write(self.k[i], k_BSGK, view, backend), write(self.v[i], v_BSGK, view, backend)
        spans = view.start_BS, view.end_BS
        return paged_attention(q_BSHK, k_GXPK, v_GXPK, view.table_BW, *spans, backend=backend), k_GXPK, v_GXPK


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
    """Where the tokens of a step go in a kind of layers, and which tokens its queries see, counted along the table.

    Tokens at a negative position have a page beyond every pool: they are dropped.
    """

    table_BW: jax.Array
    page_BS: jax.Array
    offset_BS: jax.Array
    start_BS: jax.Array
    end_BS: jax.Array


def write(pages_GXPK: jax.Array, new_BSGK: jax.Array, view: View, backend: str) -> jax.Array:
    """The pages of one layer with the new keys, or values, in their places; in place under donation.

    `backend` is that of `paged_attention`, whose kernel wants the pages to lie as they are named.
    """
    new_GBSK = new_BSGK.transpose(2, 0, 1, 3).astype(pages_GXPK.dtype)

    def heads_together(pages_GXPK, new_GBSK, page_BS, offset_BS):
        return pages_GXPK.at[:, page_BS, offset_BS].set(new_GBSK, mode="drop")

    def head_by_head(pages_GXPK, new_GBSK, page_BS, offset_BS):
        # Else XLA:TPU lays the heads of a token side by side, and copies all pages to and fro around the kernel.
        head_G11 = jnp.arange(pages_GXPK.shape[0])[:, None, None]
        return pages_GXPK.at[head_G11, page_BS, offset_BS].set(new_GBSK, mode="drop")

    arguments = (pages_GXPK, new_GBSK, view.page_BS, view.offset_BS)
    if backend == "reference":
        return heads_together(*arguments)
    return jax.lax.platform_dependent(*arguments, tpu=head_by_head, default=heads_together)


def gather(pages_GXPK: jax.Array, table_BW: jax.Array) -> jax.Array:
    """[G, B, W P, K]: every row's pages in one piece."""
    G, *_, K = pages_GXPK.shape
    return pages_GXPK[:, table_BW].reshape(G, len(table_BW), -1, K)
