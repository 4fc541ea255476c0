"""XLA's own ragged product: a grouped kernel on TPU, masked products elsewhere."""

import jax

from pallas_kernels.grouped_matmul.gating import gated_slopes


def gmm(x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """See `api.grouped_matmul`."""
    return jax.lax.ragged_dot(x_PD, w_EDF, sizes_E)


def gradients(x_PD, w_EDF, sizes_E, d_PF) -> tuple[jax.Array, jax.Array]:
    """The gradients in x and w of gmm, from that in its result."""
    return jax.vjp(lambda x_PD, w_EDF: gmm(x_PD, w_EDF, sizes_E), x_PD, w_EDF)[1](d_PF)


def gated(x_PD, gate_EDF, up_EDF, sizes_E, *, save: bool) -> tuple[jax.Array, ...]:
    """(silu(a) b,), a = x gate, b = x up, all [P, F]; with `save` also a and b."""
    a_PF, b_PF = (gmm(x_PD, w_EDF, sizes_E) for w_EDF in (gate_EDF, up_EDF))
    return (jax.nn.silu(a_PF) * b_PF, a_PF, b_PF)[: 3 if save else 1]


def gated_gradients(x_PD, gate_EDF, up_EDF, sizes_E, a_PF, b_PF, d_PF) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients in x, gate and up."""
    da_PF, db_PF = gated_slopes([d_PF, a_PF, b_PF])
    dxa_PD, dgate_EDF = gradients(x_PD, gate_EDF, sizes_E, da_PF)
    dxb_PD, dup_EDF = gradients(x_PD, up_EDF, sizes_E, db_PF)
    return dxa_PD + dxb_PD, dgate_EDF, dup_EDF
