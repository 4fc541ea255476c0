"""Grouped-query attention within the rows of a batch; which keys a query sees is decided once per forward pass."""

import jax
import jax.numpy as jnp

from north_jax.parallel import on_shards
from pallas_kernels import attention as kernels


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
