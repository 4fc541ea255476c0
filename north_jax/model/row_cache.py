"""Keys and values of a few rows, copied out of their pages for the steps of one call: a CPU gathers pages slowly."""

import dataclasses

import jax
import jax.numpy as jnp

from north_jax.model.cache import Cache, Tables, gather, write

# Finite, so that a row that sees nothing yields a number and not NaN.
_HIDDEN = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowCache:
    """Per layer keys [G, B, K, T] and values [G, B, T, K], as the products of one query a row want them.

    `offset_B`, for full and for sliding layers: the position of each row's first token here.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    offset_B: tuple[jax.Array, jax.Array]

    def views(self, tables: Tables, positions_B1: jax.Array, window: int) -> tuple[tuple, tuple]:
        """(index, start, end) [B] of full and of sliding layers: where a token goes and which ones its query sees."""

        def view(offset_B: jax.Array, reach: int | None) -> tuple:
            index_B = positions_B1[:, 0] - offset_B
            start_B = jnp.zeros_like(index_B) if reach is None else index_B + 1 - reach
            # A negative index would count from the end.
            return jnp.where(index_B >= 0, index_B, jnp.iinfo(jnp.int32).max), start_B, index_B + 1

        return view(self.offset_B[0], None), view(self.offset_B[1], window)

    def attend(self, i: int, q_B1HK, k_B1GK, v_B1GK, view: tuple, backend: str) -> tuple[jax.Array, ...]:
        """As `Cache.attend`, of one token a row."""
        index_B, start_B, end_B = view
        (G, B, K, T), dtype = self.k[i].shape, self.k[i].dtype
        row_B = jnp.arange(B)
        k_GBKT = self.k[i].at[:, row_B, :, index_B].set(k_B1GK[:, 0].astype(dtype), mode="drop")
        v_GBTK = self.v[i].at[:, row_B, index_B].set(v_B1GK[:, 0].transpose(1, 0, 2).astype(dtype), mode="drop")
        q_GBRK = (q_B1HK[:, 0] * K**-0.5).reshape(B, G, -1, K).transpose(1, 0, 2, 3)
        scores_GBRT = jnp.einsum(
            "GBRK,GBKT->GBRT", q_GBRK, k_GBKT.astype(q_GBRK.dtype), preferred_element_type=jnp.float32
        )
        key_T = jnp.arange(T)
        seen_BT = (key_T >= start_B[:, None]) & (key_T < end_B[:, None])
        scores_GBRT = jnp.where(seen_BT[:, None], scores_GBRT, _HIDDEN)
        weights_GBRT = jnp.exp(scores_GBRT - jnp.max(scores_GBRT, axis=-1, keepdims=True))
        total_GBR1 = jnp.sum(weights_GBRT, axis=-1, keepdims=True)
        out_GBRK = jnp.einsum(
            "GBRT,GBTK->GBRK",
            weights_GBRT.astype(q_GBRK.dtype),
            v_GBTK.astype(q_GBRK.dtype),
            preferred_element_type=jnp.float32,
        )
        out_GBRK = (out_GBRK / total_GBR1).astype(q_B1HK.dtype)
        return out_GBRK.transpose(1, 0, 2, 3).reshape(q_B1HK.shape), k_GBKT, v_GBTK


def copy_out(cache: Cache, tables: Tables, sliding: tuple[bool, ...]) -> RowCache:
    """The keys and values that the tables name; `sliding` says which layers are."""
    gathered = [
        [gather(pages_GXPK, tables.sliding_BW if slides else tables.full_BW) for pages_GXPK in layer]
        for *layer, slides in zip(cache.k, cache.v, sliding, strict=True)
    ]
    return RowCache(
        k=tuple(k_GBTK.transpose(0, 1, 3, 2) for k_GBTK, _ in gathered),
        v=tuple(v_GBTK for _, v_GBTK in gathered),
        offset_B=(jnp.zeros_like(tables.first_B), tables.first_B * cache.page_size),
    )


def copy_back(
    cache: Cache, rows: RowCache, tables: Tables, positions_BS: jax.Array, sliding: tuple[bool, ...], window: int
) -> Cache:
    """The cache with the rows' tokens at these positions (negative: none)."""
    both = cache.views(tables, positions_BS, window)
    row_B1, new_k, new_v = jnp.arange(len(positions_BS))[:, None], [], []
    for k_GXPK, v_GXPK, k_GBKT, v_GBTK, slides in zip(cache.k, cache.v, rows.k, rows.v, sliding, strict=True):
        index_BS = jnp.maximum(positions_BS - rows.offset_B[slides][:, None], 0)
        new_k.append(write(k_GXPK, k_GBKT[:, row_B1, :, index_BS], both[slides], "reference"))
        v_BSGK = v_GBTK[:, row_B1, index_BS].transpose(1, 2, 0, 3)
        new_v.append(write(v_GXPK, v_BSGK, both[slides], "reference"))
    return Cache(k=tuple(new_k), v=tuple(new_v))
