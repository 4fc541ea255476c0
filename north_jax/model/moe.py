"""Feed-forward layers: the gated MLP of the dense prefix, the router, and the mixture of experts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from north_jax.parallel import on_shards, parts, whole
from north_jax.parallel.sharding import RULES
from pallas_kernels.dispatch import METHODS, combine, exchange, gather, sort_by_expert
from pallas_kernels.grouped_matmul import gated_grouped_matmul, grouped_matmul

# Up to here, transposing the experts' matrices costs a CPU more than their products do: decoding, not training.
FEW_TOKENS = 64
# Numbers of an expert's matrix; where it has fewer, a loop over tiles costs a CPU more than all products at once.
SMALL_MATRIX = 4096
# Ways to bring tokens to experts on other devices; see `mixture`.
EXCHANGES = ("auto", *METHODS)
# Of a device, exchanged at one time: while these are computed the next ones travel. The buffers of a chunk have room
# for all devices' pairs, and fewer tokens would reread the experts' matrices for products too small to hide it.
CHUNK_TOKENS = 2048


def mlp(x: jax.Array, gate_DF: jax.Array, up_DF: jax.Array, down_FD: jax.Array) -> jax.Array:
    """(silu(x gate) * (x up)) down."""
    return (jax.nn.silu(x @ gate_DF) * (x @ up_DF)) @ down_FD


def router_logits(x_ND: jax.Array, router_DE: jax.Array) -> jax.Array:
    """x router, float32."""
    return jnp.einsum("ND,DE->NE", x_ND, router_DE, preferred_element_type=jnp.float32)


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


def expert_counts(indices_BSC: jax.Array, counted_BS: jax.Array, experts: int) -> jax.Array:
    """counts_BE, int32: how many counted tokens of each row chose each expert.

    A compare and a sum: on a mesh every device counts its own tokens.
    """
    hit_BSCE = (indices_BSC[..., None] == jnp.arange(experts)) & counted_BS[:, :, None, None]
    return jnp.sum(hit_BSCE, axis=(1, 2), dtype=jnp.int32)


def kind(E: int, C: int, N: int, size: int) -> str:
    """How C of E experts, of matrices of `size` numbers, are best computed for N tokens: "grouped" or "dense".

    "grouped" where many are left out, but not for a few tokens or tiny matrices: all of a few small experts cost less
    than sorting tokens by them does. And "grouped" where devices share a row, which all experts on all tokens at once
    would gather.
    """
    few_chosen = E >= 8 * C or (E >= 4 * C and N > FEW_TOKENS and size >= SMALL_MATRIX)
    return "grouped" if few_chosen or parts("sequence") > 1 else "dense"


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
    method: str = "auto",
) -> jax.Array:
    """Σ_c weight_c · mlp_c(x) over the chosen experts only: tokens sorted by expert, one grouped matmul per matrix.

    No capacity and no drops: every chosen (token, expert) pair is computed. `backend` as in `grouped_matmul`. Where
    there are fewer matrices than weights, they are this device's part of the mesh axis "expert", inside `on_shards`,
    and tokens are exchanged by `method`; see `mixture`.
    """
    (N, E), C = weights_NE.shape, indices_NC.shape[1]
    # A mask instead of a gather: its gradient needs no scatter.
    picked_NCE = indices_NC[:, :, None] == jnp.arange(E)
    weights_NC = jnp.sum(jnp.where(picked_NCE, weights_NE[:, None, :], 0.0), axis=2)

    def products(x_PD, sizes_E):
        hidden_PF = gated_grouped_matmul(x_PD, gate_EDF, up_EDF, sizes_E, backend=backend)
        return grouped_matmul(hidden_PF, down_EFD, sizes_E, backend=backend)

    if len(gate_EDF) == E:
        order_P, inverse_NC, sizes_E = sort_by_expert(indices_NC, E)
        return combine(products(gather(x_ND, order_P, inverse_NC), sizes_E), weights_NC, order_P, inverse_NC)
    (axis,) = RULES["expert"]
    if method == "auto":
        method = "ring" if parts("expert") <= C else "ragged"
    # A loop over two chunks at a time, as one can travel while the other is multiplied. The backward pass computes a
    # round again: exchanges hold room for every pair at one device, and saved for all rounds it would not fit.
    rounds = next(n for n in range(-(-N // (2 * CHUNK_TOKENS)), N + 1) if N % n == 0)

    def exchanged(part):
        chunks = 2 if rounds > 1 and len(part[0]) % 2 == 0 else 1
        out_ND, _ = exchange(*part, products, num_experts=E, axis_name=axis, method=method, chunks=chunks)
        return out_ND

    tokens = x_ND, weights_NC, indices_NC
    if rounds == 1:
        return exchanged(tokens)
    split = tuple(x.reshape(rounds, N // rounds, -1) for x in tokens)
    return jax.lax.map(jax.checkpoint(exchanged, prevent_cse=False), split).reshape(x_ND.shape)


def mixture(
    x_BSD: jax.Array,
    router_DE: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    choose: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    *,
    backend: str,
    method: str,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Router and experts: (out_BSD, logits_BSE, the chosen weights_BSC, indices_BSC); `choose` as `route`.

    On a mesh every device routes its own tokens and computes its own experts by `experts_grouped`: their matrices are
    gathered over "fsdp" for it, tokens go to their experts over "expert" and come back, and of experts that are split
    over "tensor" too the parts are added at the end. Rows that do not divide over the mesh are filled up with zeros.

    `method` as in `pallas_kernels.dispatch.exchange`, whose formulas decide for "auto": with G devices on the axis, C
    choices a token and even loads, "ring" sends (G-1) · N · 2D numbers a device and "ragged" (G-1)/G · N · 2CD. So it
    is "ring" while G <= C, the fewer bytes and not more of them when loads are uneven, and "ragged" beyond.
    "capacity", with room for the worst, is G times "ragged": for comparison, and where shapes must not depend on loads.
    """
    B = len(x_BSD)
    router, matrix = ("embed", "router"), ("expert", "embed", "expert_mlp")
    down, rows = ("expert", "expert_mlp", "embed"), ("batch", "sequence", None)

    def local(x_BSD, router_DE, gate_EDF, up_EDF, down_EFD):
        x_ND = x_BSD.reshape(-1, x_BSD.shape[-1])
        logits_NE = router_logits(x_ND, whole(router_DE, router, "embed"))
        weights_NE, indices_NC = choose(logits_NE)
        matrices = (whole(w, axes, "embed") for w, axes in ((gate_EDF, matrix), (up_EDF, matrix), (down_EFD, down)))
        out_ND = experts_grouped(x_ND, weights_NE, indices_NC, *matrices, backend=backend, method=method)
        weights_NC = jnp.take_along_axis(weights_NE, indices_NC, axis=1)
        each = (v.reshape(*x_BSD.shape[:2], -1) for v in (out_ND, logits_NE, weights_NC, indices_NC))
        out_BSD, *routing = each
        return out_BSD[None], *routing

    fill = -B % parts("batch")
    if fill:
        x_BSD = jnp.pad(x_BSD, ((0, fill), (0, 0), (0, 0)))
    # The devices of "tensor" give what their part of the width adds, along an axis that is theirs, and the sum is taken
    # outside: as a psum inside, its gradient would be one more sum over them.
    outs = on_shards(local, (rows, router, matrix, matrix, down), [("expert_mlp", *rows), rows, rows, rows])
    out_TBSD, *routing = outs(x_BSD, router_DE, gate_EDF, up_EDF, down_EFD)
    # Not jnp.sum, which would send bfloat16 as float32.
    out_BSD = jax.lax.reduce_sum(out_TBSD, axes=(0,))
    return tuple(value[:B] for value in (out_BSD, *routing))
