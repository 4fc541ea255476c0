"""Grouped-query attention within the rows of a batch; which keys a query sees is decided once per forward pass."""

import jax
import jax.numpy as jnp

from north_jax.parallel import context, on_shards
from pallas_kernels import attention as kernels
from pallas_kernels import rotary

# Heads side by side, as projections leave them and kernels take them. Between devices and a device's part of an array
# with an axis for the heads, a TPU's compiler would lay it out anew.
QUERIES, KEYS = ("batch", "sequence", "heads"), ("batch", "sequence", "kv_heads")


def row_spans(ids_BS: jax.Array, segment_ids_BS: jax.Array | None, window: int) -> tuple[tuple, tuple]:
    """The spans (start_BS, end_BS) of the keys that each query of the rows sees, in full and in sliding layers.

    A key is visible when it is not later than the query, in the same run of equal segment ids and, sliding, among the
    last `window`. Order and window go by the index in the row. Padding (segment 0) sees padding only, so no query is
    without a key. Where devices share a row, spans count places of the row and lie in the zig-zag order of its queries.
    """

    def wide(spans) -> tuple:
        return tuple(context.to_zigzag(jnp.broadcast_to(x_BS, ids_BS.shape)) for x_BS in spans)

    S = ids_BS.shape[1]
    if segment_ids_BS is not None:
        segment_ids_BS = context.whole_rows(segment_ids_BS)
    full = kernels.spans(S, segment_ids_BS=segment_ids_BS)
    return wide(full), wide(kernels.spans(S, window=window, segment_ids_BS=segment_ids_BS))


def attend_rows(
    q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, spans: tuple, *, window: int | None, backend: str
) -> jax.Array:
    """Attention within rows over `spans`, which lie in the window if there is one -> [B, S, H, K].

    `backend` as in `pallas_kernels.attention`. On a mesh every device attends with its rows, its heads and its part of
    every row, in zig-zag order (`north_jax.parallel.context`).
    """
    S, K = q_BSHK.shape[1], q_BSHK.shape[3]

    def attend(q_BSL, k_BSL, v_BSL, *spans):
        return _flat(attend_heads(*(_heads(x_BSL, K) for x_BSL in (q_BSL, k_BSL, v_BSL)), *spans))

    def attend_heads(q_BSHK, k_BSGK, v_BSGK, start_BS, end_BS):
        if context.context_size() == 1:
            # A row's own length is a window too: no query sees what comes after it.
            return kernels.attention(q_BSHK, k_BSGK, v_BSGK, start_BS, end_BS, window=window or S, backend=backend)[0]
        if window is None:
            k_BTGK, v_BTGK = context.gathered(k_BSGK), context.gathered(v_BSGK)
            return kernels.attention(q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS, backend=backend)[0]
        # The two chunks are rows of their own, whose keys begin h places before the chunk.
        h = context.halo_length(S, window)
        keys_NTGK = [_rows(context.with_halo(x_BSGK, h)) for x_BSGK in (k_BSGK, v_BSGK)]
        first_21 = context.chunk_starts(S)[:, None] - h
        spans_NL = [_rows(_chunks(x_BS) - first_21) for x_BS in (start_BS, end_BS)]
        out_NLHK = kernels.attention(_rows(_chunks(q_BSHK)), *keys_NTGK, *spans_NL, backend=backend)[0]
        return out_NLHK.reshape(q_BSHK.shape)

    rows = ("batch", "sequence")
    flat = (_flat(x_BSHK) for x_BSHK in (q_BSHK, k_BSGK, v_BSGK))
    return _heads(on_shards(attend, (QUERIES, KEYS, KEYS, rows, rows), QUERIES)(*flat, *spans), K)


def turn_rows(
    q_BSHK: jax.Array, k_BSGK: jax.Array, cos_BSK: jax.Array, sin_BSK: jax.Array, *, backend: str
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys of rows, turned to their positions by `pallas_kernels.rotary`; `backend` is attention's.

    Where attention is not by our kernels for TPUs, this is neither. On a mesh every device turns what it has.
    """
    how, K = backend if backend in rotary.BACKENDS else "reference", q_BSHK.shape[3]

    def turn(q_BSL, k_BSL, *angles):
        return tuple(_flat(rotary.rotate(_heads(x_BSL, K), *angles, backend=how)) for x_BSL in (q_BSL, k_BSL))

    angles = ("batch", "sequence", None)
    turned = on_shards(turn, (QUERIES, KEYS, angles, angles), [QUERIES, KEYS])
    return tuple(_heads(x_BSL, K) for x_BSL in turned(_flat(q_BSHK), _flat(k_BSGK), cos_BSK, sin_BSK))


def _flat(x_BSHK: jax.Array) -> jax.Array:
    return x_BSHK.reshape(*x_BSHK.shape[:2], -1)


def _heads(x_BSL: jax.Array, K: int) -> jax.Array:
    return x_BSL.reshape(*x_BSL.shape[:2], -1, K)


def _chunks(x_BS: jax.Array) -> jax.Array:
    """[B, S, …] -> [B, 2, L, …]: a device's part of every row as its two chunks."""
    return x_BS.reshape(x_BS.shape[0], 2, -1, *x_BS.shape[2:])


def _rows(x_B2L: jax.Array) -> jax.Array:
    """[B, 2, L, …] -> [2 B, L, …]."""
    return x_B2L.reshape(-1, *x_B2L.shape[2:])
