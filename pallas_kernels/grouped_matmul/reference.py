"""The definition in plain jnp: every product, then a selection. Quadratic in memory; for tests."""

import jax
import jax.numpy as jnp


def grouped_matmul(x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """See `api.grouped_matmul`."""
    ends_E = jnp.cumsum(sizes_E)
    rows_P = jnp.arange(x_PD.shape[0])
    member_PE = (rows_P[:, None] >= ends_E - sizes_E) & (rows_P[:, None] < ends_E)
    all_PEF = jnp.einsum("PD,EDF->PEF", x_PD, w_EDF)
    return jnp.sum(jnp.where(member_PE[:, :, None], all_PEF, 0), axis=1)


def gated_grouped_matmul(x_PD: jax.Array, gate_EDF: jax.Array, up_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """See `api.gated_grouped_matmul`."""
    return jax.nn.silu(grouped_matmul(x_PD, gate_EDF, sizes_E)) * grouped_matmul(x_PD, up_EDF, sizes_E)
