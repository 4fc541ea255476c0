"""Feed-forward layers: the gated MLP of the dense prefix, the router, and the mixture of experts."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import combine, gather, sort_by_expert
from pallas_kernels.grouped_matmul import gated_grouped_matmul, grouped_matmul

# Up to here, transposing the experts' matrices costs a CPU more than their products do: decoding, not training.
FEW_TOKENS = 64


def mlp(x: jax.Array, gate_DF: jax.Array, up_DF: jax.Array, down_FD: jax.Array) -> jax.Array:
    """(silu(x gate) * (x up)) down."""
    return (jax.nn.silu(x @ gate_DF) * (x @ up_DF)) @ down_FD


def route(logits_NE: jax.Array, chosen: int, selection: str, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """The `chosen` experts with the largest logits per token, ties to the lowest index.

    Returns weights_NE, float32 and zero where not chosen, and indices_NC by falling logit. Weights are
    sigmoid(logit), divided by their sum only if `normalise`; or, for `selection` "softmax", a softmax over the
    chosen logits. The choice itself has no gradient.
    """
    logits_NE = logits_NE.astype(jnp.float32)
    _, indices_NC = jax.lax.top_k(jax.lax.stop_gradient(logits_NE), chosen)
    # A mask instead of a gather: its gradient needs no scatter.
    picked_NE = jnp.any(indices_NC[:, :, None] == jnp.arange(logits_NE.shape[-1]), axis=1)
    if selection == "softmax":
        return jax.nn.softmax(logits_NE, axis=-1, where=picked_NE), indices_NC
    weights_NE = jnp.where(picked_NE, jax.nn.sigmoid(logits_NE), 0.0)
    if normalise:
        weights_NE = weights_NE / jnp.sum(weights_NE, axis=-1, keepdims=True)
    return weights_NE, indices_NC


def experts_dense(
    x_ND: jax.Array, weights_NE: jax.Array, gate_EDF: jax.Array, up_EDF: jax.Array, down_EFD: jax.Array
) -> jax.Array:
    """Σ_e weight_e · mlp_e(x) with every expert computed. Exact; the cost grows with E, not with C."""
    E, D, F = gate_EDF.shape
    if len(x_ND) <= FEW_TOKENS:  # a product an expert, on the matrices as they lie
        x_END = jnp.broadcast_to(x_ND, (E, *x_ND.shape))
        hidden_NEF = (jax.nn.silu(x_END @ gate_EDF) * (x_END @ up_EDF)).transpose(1, 0, 2)
    else:  # flat products: as einsums over E and F they and their gradients miss XLA's fast path on the CPU
        gate_DQ, up_DQ = (w_EDF.transpose(1, 0, 2).reshape(D, E * F) for w_EDF in (gate_EDF, up_EDF))
        hidden_NEF = (jax.nn.silu(x_ND @ gate_DQ) * (x_ND @ up_DQ)).reshape(-1, E, F)
    hidden_NEF = hidden_NEF * weights_NE.astype(x_ND.dtype)[:, :, None]
    return hidden_NEF.reshape(-1, E * F) @ down_EFD.reshape(E * F, D)


def experts_grouped(
    x_ND: jax.Array,
    weights_NE: jax.Array,
    indices_NC: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    *,
    backend: str = "auto",
) -> jax.Array:
    """Σ_c weight_c · mlp_c(x) over the chosen experts only: tokens sorted by expert, one grouped matmul per matrix.

    No capacity and no drops: every chosen (token, expert) pair is computed. `backend` as in `grouped_matmul`; where the
    experts are spread over a mesh, "auto" is XLA's product, which the compiler can split.
    """
    E = gate_EDF.shape[0]
    if backend == "auto" and jax.sharding.get_abstract_mesh().size > 1:
        backend = "xla"
    order_P, inverse_NC, sizes_E = sort_by_expert(indices_NC, E)
    x_PD = gather(x_ND, order_P, inverse_NC)
    hidden_PF = gated_grouped_matmul(x_PD, gate_EDF, up_EDF, sizes_E, backend=backend)
    out_PD = grouped_matmul(hidden_PF, down_EFD, sizes_E, backend=backend)
    # A mask instead of a gather: its gradient needs no scatter.
    picked_NCE = indices_NC[:, :, None] == jnp.arange(E)
    weights_NC = jnp.sum(jnp.where(picked_NCE, weights_NE[:, None, :], 0.0), axis=2)
    return combine(out_PD, weights_NC, order_P, inverse_NC)
