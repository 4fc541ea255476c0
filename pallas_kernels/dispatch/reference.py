"""The definitions in plain jnp, with a comparison sort and scatters; for tests."""

import jax
import jax.numpy as jnp


def sort_by_expert(indices_NC: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.sort_by_expert`."""
    expert_P = indices_NC.reshape(-1)
    P = expert_P.size
    order_P = jnp.argsort(expert_P, stable=True).astype(jnp.int32)
    inverse_P = jnp.zeros(P, jnp.int32).at[order_P].set(jnp.arange(P, dtype=jnp.int32))
    sizes_E = jnp.bincount(expert_P, length=experts + 1).astype(jnp.int32)[:experts]
    order_P = jnp.where(jnp.arange(P) < jnp.sum(sizes_E), order_P, P)
    inverse_P = jnp.where(expert_P < experts, inverse_P, P)
    return order_P, inverse_P.reshape(indices_NC.shape), sizes_E


def gather(x_ND: jax.Array, order_P: jax.Array, inverse_NC: jax.Array) -> jax.Array:
    """See `api.gather`."""
    return x_ND.at[order_P // inverse_NC.shape[1]].get(mode="fill", fill_value=0)


def combine(out_PD: jax.Array, weights_NC: jax.Array, order_P: jax.Array, inverse_NC: jax.Array) -> jax.Array:
    """See `api.combine`; row by row, added to the token that it belongs to."""
    N, C = inverse_NC.shape
    weight_P = weights_NC.reshape(-1).at[order_P].get(mode="fill", fill_value=0)
    rows_PD = weight_P[:, None].astype(jnp.float32) * out_PD.astype(jnp.float32)
    zeros_ND = jnp.zeros((N, out_PD.shape[1]), jnp.float32)
    return zeros_ND.at[order_P // C].add(rows_PD, mode="drop").astype(out_PD.dtype)
