"""XLA's own ragged product: a grouped kernel on TPU, masked products elsewhere."""

import jax


def grouped_matmul(x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """See `api.grouped_matmul`."""
    return jax.lax.ragged_dot(x_PD, w_EDF, sizes_E)


def gated(x_PD: jax.Array, gate_EDF: jax.Array, up_EDF: jax.Array, sizes_E: jax.Array) -> tuple[jax.Array, ...]:
    """silu(a) b, a = x gate and b = x up, all [P, F]."""
    a_PF, b_PF = (grouped_matmul(x_PD, w_EDF, sizes_E) for w_EDF in (gate_EDF, up_EDF))
    return jax.nn.silu(a_PF) * b_PF, a_PF, b_PF


def gated_grouped_matmul(x_PD: jax.Array, gate_EDF: jax.Array, up_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """See `api.gated_grouped_matmul`."""
    return gated(x_PD, gate_EDF, up_EDF, sizes_E)[0]
