"""What runs everywhere: a counting sort and row gathers, without a sort or a scatter in either direction."""

import functools

import jax
import jax.numpy as jnp

CHUNK = 128  # pairs compared with each other, all with all, to rank them within their chunk
FAN = 64  # entries that one step of the search compares: each step is a gather, the dear part on a TPU


def search(begin_M: jax.Array, value_P: jax.Array) -> jax.Array:
    """For each value, the last m with begin_M[m] <= value. `begin_M` is int32, does not fall and starts at or below."""
    M = begin_M.size
    stride = 1
    while stride * FAN < M:
        stride *= FAN
    begin_M = jnp.pad(begin_M, (0, -M % (stride * FAN)), constant_values=jnp.iinfo(jnp.int32).max)
    found_P = jnp.sum(begin_M[::stride] <= value_P[:, None], axis=1, dtype=jnp.int32) - 1
    while stride > 1:
        stride //= FAN
        rows_PF = begin_M[::stride].reshape(-1, FAN).at[found_P].get(mode="promise_in_bounds")
        found_P = found_P * FAN + jnp.sum(rows_PF <= value_P[:, None], axis=1, dtype=jnp.int32) - 1
    return found_P


@functools.partial(jax.jit, static_argnums=1)  # some sixty small operations: one compilation where nobody else jits
def sort_by_expert(indices_NC: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.sort_by_expert`. Memory grows with P, work with P * (CHUNK + experts)."""
    P = indices_NC.size
    T = min(CHUNK, P)
    expert_P = indices_NC.reshape(-1).astype(jnp.int32)
    expert_KT = jnp.pad(expert_P, (0, -P % T), constant_values=experts).reshape(-1, T)
    K = len(expert_KT)
    at_T, at_E = jnp.arange(T, dtype=jnp.int32), jnp.arange(experts, dtype=jnp.int32)

    # Inside a chunk: how many pairs of the same expert come before, how many of lower experts there are, and which
    # pair is at each place of the chunk in order. Every compare is fused into its sum, over an axis that is not the
    # last one so that sums are vectors: [K, T, T] is never stored.
    other_KT1 = expert_KT[:, :, None]
    before_TT = at_T[:, None] < at_T
    rank_KT = jnp.sum((other_KT1 == expert_KT[:, None]) & before_TT, axis=1, dtype=jnp.int32)
    below_KT = jnp.sum(other_KT1 < expert_KT[:, None], axis=1, dtype=jnp.int32)
    at_place_KTT = (below_KT + rank_KT)[:, :, None] == at_T
    pair_KT = jnp.sum(jnp.where(at_place_KTT, at_T[:, None], 0), axis=1, dtype=jnp.int32)

    # Over the chunks: where the pairs of an expert from a chunk begin, experts first and then chunks in order.
    count_EK = jnp.sum(other_KT1 == at_E, axis=1, dtype=jnp.int32).T
    end_EK = jnp.cumsum(count_EK.reshape(-1), dtype=jnp.int32).reshape(experts, K)
    begin_EK = end_EK - count_EK

    chosen_KET = expert_KT[:, None] == at_E[:, None]
    place_KT = rank_KT + jnp.sum(jnp.where(chosen_KET, begin_EK.T[:, :, None], 0), axis=1, dtype=jnp.int32)
    inverse_P = jnp.where(expert_P < experts, place_KT.reshape(-1)[:P], P)

    # Back from a place to its pair: the expert and chunk whose stretch holds it, then the place within the chunk.
    at_P = jnp.arange(P, dtype=jnp.int32)
    cell_P = search(begin_EK.reshape(-1), at_P)
    shift_EK = jnp.cumsum(count_EK, axis=0, dtype=jnp.int32) - count_EK - begin_EK + T * jnp.arange(K, dtype=jnp.int32)
    inside_P = at_P + shift_EK.reshape(-1).at[cell_P].get(mode="promise_in_bounds")
    pair_KT = pair_KT + T * jnp.arange(K, dtype=jnp.int32)[:, None]
    order_P = pair_KT.reshape(-1).at[inside_P].get(mode="fill", fill_value=P)
    order_P = jnp.where(at_P < end_EK[-1, -1], order_P, P)
    return order_P, inverse_P.reshape(indices_NC.shape), jnp.sum(count_EK, axis=1, dtype=jnp.int32)


def _rows(x_ND: jax.Array, index: jax.Array) -> jax.Array:
    """Rows by index; zeros where the index is past the end."""
    return jnp.asarray(x_ND).at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def gather(x_ND: jax.Array, order_P: jax.Array, inverse_NC: jax.Array) -> jax.Array:
    """See `api.gather`."""
    return _rows(x_ND, order_P // inverse_NC.shape[1])


def _gather_forward(x_ND, order_P, inverse_NC):
    return gather(x_ND, order_P, inverse_NC), inverse_NC


def _gather_backward(inverse_NC, ct_PD):
    return jnp.sum(_rows(ct_PD, inverse_NC), axis=1, dtype=jnp.float32).astype(ct_PD.dtype), None, None


gather.defvjp(_gather_forward, _gather_backward)


@jax.custom_vjp
def combine(out_PD: jax.Array, weights_NC: jax.Array, order_P: jax.Array, inverse_NC: jax.Array) -> jax.Array:
    """See `api.combine`."""
    # A sum of products instead of an einsum: it can be fused with the gather.
    rows_NCD = _rows(out_PD, inverse_NC).astype(jnp.float32)
    return jnp.sum(weights_NC[:, :, None].astype(jnp.float32) * rows_NCD, axis=1).astype(out_PD.dtype)


def _combine_forward(out_PD, weights_NC, order_P, inverse_NC):
    return combine(out_PD, weights_NC, order_P, inverse_NC), (out_PD, weights_NC, order_P, inverse_NC)


def _combine_backward(saved, ct_ND):
    out_PD, weights_NC, order_P, inverse_NC = saved
    weight_P = _rows(weights_NC.reshape(-1), order_P).astype(jnp.float32)
    ct_PD = weight_P[:, None] * _rows(ct_ND, order_P // inverse_NC.shape[1]).astype(jnp.float32)
    products_NCD = _rows(out_PD, inverse_NC).astype(jnp.float32) * ct_ND[:, None, :].astype(jnp.float32)
    return ct_PD.astype(out_PD.dtype), jnp.sum(products_NCD, axis=2).astype(weights_NC.dtype), None, None


combine.defvjp(_combine_forward, _combine_backward)
