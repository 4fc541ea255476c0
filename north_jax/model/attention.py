"""Grouped-query attention: within the rows of a batch, and under a mask over keys that were cached."""

import jax
import jax.numpy as jnp

from north_jax.parallel import on_shards
from pallas_kernels import attention as kernels

# Finite, so that a query that sees nothing (a padding token of a cached step) yields a number and not NaN.
_HIDDEN = -1e30


def attend(q_BSHK: jax.Array, k_GBTK: jax.Array, v_GBTK: jax.Array, mask_BST: jax.Array) -> jax.Array:
    """softmax(q·k / sqrt(K)) v over the visible keys -> [B, S, H, K]; query head h reads key/value head h // (H / G).

    Keys and values come head by head. Scores and softmax are float32. `mask_BST` is True where a key is visible; its B
    may be 1.
    """
    B, S, H, K = q_BSHK.shape
    G, _, T, _ = k_GBTK.shape
    R = H // G
    # The R query heads of one key/value head are rows of one matrix: keys and values are never repeated.
    q_GBMK = (q_BSHK * K**-0.5).reshape(B, S, G, R, K).transpose(2, 0, 3, 1, 4).reshape(G, B, R * S, K)
    scores_GBMT = jnp.einsum("GBMK,GBTK->GBMT", q_GBMK, k_GBTK, preferred_element_type=jnp.float32)
    scores_GBRST = jnp.where(mask_BST[:, None], scores_GBMT.reshape(G, B, R, S, T), _HIDDEN)
    weights_GBMT = jax.nn.softmax(scores_GBRST, axis=-1).reshape(G, B, R * S, T).astype(v_GBTK.dtype)
    out_GBMK = jnp.einsum("GBMT,GBTK->GBMK", weights_GBMT, v_GBTK)
    return out_GBMK.reshape(G, B, R, S, K).transpose(1, 3, 0, 2, 4).reshape(B, S, H, K)


def row_spans(ids_BS: jax.Array, segment_ids_BS: jax.Array | None, window: int) -> tuple[tuple, tuple]:
    """The spans (start_BS, end_BS) of the keys that each query of the rows sees, in full and in sliding layers.

    A key is visible when it is not later than the query, in the same run of equal segment ids and, sliding, among the
    last `window`. Order and window go by the index in the row. Padding (segment 0) sees padding only, so no query is
    without a key.
    """

    def wide(spans) -> tuple:
        return tuple(jnp.broadcast_to(x_BS, ids_BS.shape) for x_BS in spans)

    S = ids_BS.shape[1]
    full = kernels.spans(S, segment_ids_BS=segment_ids_BS)
    return wide(full), wide(kernels.spans(S, window=window, segment_ids_BS=segment_ids_BS))


def attend_rows(
    q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, spans: tuple, *, window: int | None, backend: str
) -> jax.Array:
    """Attention within rows over `spans`, which lie in the window if there is one -> [B, S, H, K].

    `backend` as in `pallas_kernels.attention`. On a mesh every device attends with its rows and heads.
    """

    def attend(q_BSHK, k_BSGK, v_BSGK, start_BS, end_BS):
        return kernels.attention(q_BSHK, k_BSGK, v_BSGK, start_BS, end_BS, window=window, backend=backend)[0]

    queries, keys = ("batch", "sequence", "heads", "head_dim"), ("batch", "sequence", "kv_heads", "head_dim")
    rows = ("batch", "sequence")
    return on_shards(attend, (queries, keys, keys, rows, rows), queries)(q_BSHK, k_BSGK, v_BSGK, *spans)
