"""Ways to bring tokens to experts on other devices of a mesh axis and their results back; see `api.exchange`.

G devices of the axis with E experts each; S stands for G as the sending side. Each returns its tokens' results and
how many of its pairs were left out.
"""

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch.xla import combine, gather, search, sort_by_expert


def ring(x_ND, weights_NC, indices_NC, experts, num_experts, axis_name):
    """Everybody's tokens here, this device's experts on them, and the sums over devices back to the tokens' owners."""
    E = num_experts // jax.lax.axis_size(axis_name)
    x_MD, weights_MC, indices_MC = (
        jax.lax.all_gather(a, axis_name, tiled=True) for a in (x_ND, weights_NC, indices_NC)
    )
    local_MC = indices_MC - jax.lax.axis_index(axis_name) * E
    local_MC = jnp.where((local_MC >= 0) & (local_MC < E), local_MC, E)
    order_P, inverse_MC, sizes_E = sort_by_expert(local_MC, E)
    out_PD = experts(gather(x_MD, order_P, inverse_MC), sizes_E)
    out_MD = combine(out_PD, weights_MC, order_P, inverse_MC).astype(x_ND.dtype)
    out_ND = jax.lax.psum_scatter(out_MD, axis_name, scatter_dimension=0, tiled=True)
    return out_ND, jnp.zeros_like(indices_NC[0, 0])


def ragged(x_ND, weights_NC, indices_NC, experts, num_experts, axis_name):
    """Each pair's row to the device of its expert and back, in blocks of as many rows as there are."""
    G = jax.lax.axis_size(axis_name)
    E, P = num_experts // G, indices_NC.size
    order_P, inverse_NC, sizes = sort_by_expert(indices_NC, num_experts)
    sizes_SGE = jax.lax.all_gather(sizes, axis_name).reshape(G, G, E)
    sizes_SG = jnp.sum(sizes_SGE, axis=2)
    rows_RD = _move(gather(x_ND, order_P, inverse_NC), sizes_SG, axis_name, P, G * P)
    # What came lies by sender and then by expert, as the sizes tell: nobody sends expert numbers.
    here_SE = sizes_SGE[:, jax.lax.axis_index(axis_name)].reshape(-1)
    at_R = jnp.arange(G * P, dtype=jnp.int32)
    expert_R = jnp.where(at_R < jnp.sum(here_SE), search(_begins(here_SE), at_R) % E, E)
    back_PD = _move(_grouped(rows_RD, expert_R, experts, E), sizes_SG.T, axis_name, G * P, P)
    out_ND = combine(back_PD, weights_NC, order_P, inverse_NC).astype(x_ND.dtype)
    return out_ND, jnp.zeros_like(indices_NC[0, 0])


def capacity(x_ND, weights_NC, indices_NC, experts, num_experts, axis_name, factor=None):
    """The same in blocks of one size, with what does not fit left out and counted."""
    G = jax.lax.axis_size(axis_name)
    E, P = num_experts // G, indices_NC.size
    room = P if factor is None else min(P, math.ceil(factor * P / G))
    # In order of devices and not of experts, so that it is not always the last expert of a device that loses.
    order_P, inverse_NC, sizes_G = sort_by_expert(indices_NC // E, G)
    begin_G = _begins(sizes_G)
    at_R = jnp.arange(room, dtype=jnp.int32)
    order_GR = order_P.at[begin_G[:, None] + at_R].get(mode="fill", fill_value=P)
    order_R = jnp.where(at_R < sizes_G[:, None], order_GR, P).reshape(-1)
    within_NC = inverse_NC - begin_G[indices_NC // E]
    inverse_NC = jnp.where(within_NC < room, indices_NC // E * room + within_NC, G * room)

    def swap(rows_R):
        rows_GR = rows_R.reshape(G, room, *rows_R.shape[1:])
        return jax.lax.all_to_all(rows_GR, axis_name, split_axis=0, concat_axis=0).reshape(rows_R.shape)

    expert_R = (indices_NC % E).reshape(-1).at[order_R].get(mode="fill", fill_value=E)
    rows_RD = swap(gather(x_ND, order_R, inverse_NC))
    back_RD = swap(_grouped(rows_RD, swap(expert_R), experts, E))
    out_ND = combine(back_RD, weights_NC, order_R, inverse_NC).astype(x_ND.dtype)
    return out_ND, jnp.sum(jnp.maximum(sizes_G - room, 0))


METHODS = {"ring": ring, "ragged": ragged, "capacity": capacity}


def _begins(sizes: jax.Array) -> jax.Array:
    """Where each of consecutive blocks begins."""
    return jnp.cumsum(sizes, dtype=jnp.int32) - sizes


def _grouped(rows_RD, expert_R, experts, E):
    """experts() on rows in any order; expert_R is E where a row is none of theirs."""
    order_R, inverse_R1, sizes_E = sort_by_expert(expert_R[:, None], E)
    out_RD = experts(gather(rows_RD, order_R, inverse_R1), sizes_E)
    return gather(out_RD, inverse_R1[:, 0], order_R[:, None])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _move(rows_PD, sizes_SG, axis_name, rows_in, rows_out):
    """Sends the first sizes_SG[me, 0] of the `rows_in` rows to device 0, the next sizes_SG[me, 1] to device 1, …

    Returns [rows_out, D]: what came, by sender, then zeros. The gradient is the same with the sizes transposed.
    """
    return jax.lax.platform_dependent(
        rows_PD,
        sizes_SG,
        cpu=functools.partial(_move_dense, axis_name=axis_name, rows_out=rows_out),
        default=functools.partial(_move_ragged, axis_name=axis_name, rows_out=rows_out),
    )


def _move_forward(rows_PD, sizes_SG, axis_name, rows_in, rows_out):
    return _move(rows_PD, sizes_SG, axis_name, rows_in, rows_out), sizes_SG


def _move_backward(axis_name, rows_in, rows_out, sizes_SG, ct):
    return _move(ct, sizes_SG.T, axis_name, rows_out, rows_in), None


_move.defvjp(_move_forward, _move_backward)


def _move_ragged(rows_PD, sizes_SG, *, axis_name, rows_out):
    me = jax.lax.axis_index(axis_name)
    # Offsets in what this device sends, and where on the others that lands: after what lower devices send them.
    send_G, from_S = sizes_SG[me], sizes_SG[:, me]
    land_G = (jnp.cumsum(sizes_SG, axis=0, dtype=jnp.int32) - sizes_SG)[me]
    zeros = jnp.broadcast_to(jnp.zeros_like(rows_PD[:1]), (rows_out, rows_PD.shape[1]))
    return jax.lax.ragged_all_to_all(rows_PD, zeros, _begins(send_G), send_G, land_G, from_S, axis_name=axis_name)


def _move_dense(rows_PD, sizes_SG, *, axis_name, rows_out):
    """For XLA's CPU compiler, which lacks ragged_all_to_all: every row to everybody, then a choice of rows."""
    me = jax.lax.axis_index(axis_name)
    all_QD = jax.lax.all_gather(rows_PD, axis_name, tiled=True)
    begin_S = _begins(sizes_SG[:, me])
    at = jnp.arange(rows_out, dtype=jnp.int32)
    sender = search(begin_S, at)
    skipped_S = (jnp.cumsum(sizes_SG, axis=1, dtype=jnp.int32) - sizes_SG)[:, me]
    row = sender * len(rows_PD) + (at - begin_S[sender]) + skipped_S[sender]
    row = jnp.where(at < jnp.sum(sizes_SG[:, me]), row, len(all_QD))
    return all_QD.at[row].get(mode="fill", fill_value=0)
