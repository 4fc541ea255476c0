"""XLA's own ragged product: a grouped kernel on TPU, masked products elsewhere."""

import jax


def grouped_matmul(x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """See `api.grouped_matmul`."""
    return jax.lax.ragged_dot(x_PD, w_EDF, sizes_E)


def gated_grouped_matmul(x_PD: jax.Array, gate_EDF: jax.Array, up_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """See `api.gated_grouped_matmul`."""
    return jax.nn.silu(grouped_matmul(x_PD, gate_EDF, sizes_E)) * grouped_matmul(x_PD, up_EDF, sizes_E)
