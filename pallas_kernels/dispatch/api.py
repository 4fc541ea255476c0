"""The public functions: they check their arguments, then call what runs everywhere.

N tokens choose C experts each; P = N * C counts the pairs of a token and a chosen expert, numbered token by token.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import xla
from pallas_kernels.dispatch.methods import METHODS


def sort_by_expert(indices_NC: jax.Array, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The pairs in order of their expert, pairs of one expert in their own order: a stable counting sort.

    `indices_NC` holds expert numbers from 0; a number >= `experts` is none of them, and its pair is left out. Returns,
    all int32,

        order_P     the pair at each place, and P (past the end) at the places that are left over,
        inverse_NC  the place of each pair, and P for a pair that is left out,
        sizes_E     the number of pairs of each expert.

    Where no pair is left out, order and inverse are each other's inverse permutations. Raises ValueError when
    `indices_NC` is not a matrix of whole numbers.
    """
    if indices_NC.ndim != 2 or indices_NC.size == 0 or not jnp.issubdtype(indices_NC.dtype, jnp.integer):
        raise ValueError(f"sort_by_expert: indices are {indices_NC.dtype} {indices_NC.shape}; pass int32 [N, C]")
    if experts < 1:
        raise ValueError(f"sort_by_expert: {experts} experts; there must be one at least")
    return xla.sort_by_expert(indices_NC, experts)


def gather(x_ND: jax.Array, order_P: jax.Array, inverse_NC: jax.Array) -> jax.Array:
    """x_PD[p] = x_ND[order_P[p] // C], zeros where order_P[p] is past the last pair.

    `inverse_NC` places the pairs among the P rows (or past them, for none) and serves the gradient, which is a gather
    too: dx_ND[n] = Σ_c dx_PD[inverse_NC[n, c]], added in float32. P need not be N * C. Raises ValueError on shapes
    that do not fit.
    """
    _check("gather", x_ND.ndim == 2 and x_ND.shape[0] == inverse_NC.shape[0], x_ND, order_P, inverse_NC)
    return xla.gather(x_ND, order_P, inverse_NC)


def combine(out_PD: jax.Array, weights_NC: jax.Array, order_P: jax.Array, inverse_NC: jax.Array) -> jax.Array:
    """out_ND[n] = Σ_c weights_NC[n, c] * out_PD[inverse_NC[n, c]], added in float32 and given in out_PD's dtype.

    A pair whose place is past the P rows adds nothing. The gradients gather too:

        dout_PD[p] = weights[order_P[p]] * dout_ND[order_P[p] // C],   zeros where order_P[p] is past the last pair
        dweights_NC[n, c] = out_PD[inverse_NC[n, c]] · dout_ND[n]

    Raises ValueError on shapes that do not fit.
    """
    fits = out_PD.ndim == 2 and out_PD.shape[0] == order_P.size and weights_NC.shape == inverse_NC.shape
    _check("combine", fits, out_PD, order_P, inverse_NC)
    return xla.combine(out_PD, weights_NC, order_P, inverse_NC)


def _check(name: str, fits: bool, rows: jax.Array, order_P: jax.Array, inverse_NC: jax.Array) -> None:
    if not fits or order_P.ndim != 1 or inverse_NC.ndim != 2:
        raise ValueError(
            f"{name}: rows {rows.shape}, order {order_P.shape} and inverse {inverse_NC.shape} do not fit;"
            " pass what sort_by_expert returned for these tokens"
        )


def exchange(
    x_ND: jax.Array,
    weights_NC: jax.Array,
    indices_NC: jax.Array,
    experts: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    num_experts: int,
    axis_name: str,
    method: str,
    chunks: int = 1,
    capacity_factor: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """out_ND[n] = Σ_c weights_NC[n, c] * expert_{indices_NC[n, c]}(x_ND[n]), the experts spread over a mesh axis.

    Called inside `jax.shard_map`: N tokens are here, and of the `num_experts` experts, of which indices_NC holds the
    global numbers, device i of the G on `axis_name` has the E = num_experts / G from i * E on. The caller's
    `experts(x_PD, sizes_E) -> out_PD` runs the local ones, sizes_E[0] rows for the first, …; the rows past the sum of
    the sizes are zeros and what it returns for them is not read. Differentiable in everything.

    Methods, and the bytes that a device sends forward, b per number of x; the gradient's as many again:

        ring      all-gather of tokens and routing, every device runs its experts on all of them, reduce-scatter of the
                  results:                             (G-1) * N * (2 * D * b + C * (4 + weights' b))
        ragged    each pair's row to the device of its expert and back, no more than that (on a CPU, which lacks
                  ragged_all_to_all, a stand-in):      2 * (pairs for other devices) * D * b + (G-1) * num_experts * 4
        capacity  the same with room for R rows to each device: 2 * (G-1) * R * D * b + (G-1) * R * 4

    (The gradient of ring exchanges no indices, that of the others no counts and no expert numbers.) R = N * C by
    default, which always has room; `capacity_factor` f makes it ⌈f * N * C / G⌉, and the pairs that find none, the last
    ones, add nothing to their tokens. Returns (out_ND in x's dtype, dropped): the pairs so left out on all devices of
    the axis, int32, the same on each of them and zero for the other methods.

    The rows of `experts` are P = G * N * C for ring and ragged, G * R for capacity. `chunks` cuts the N tokens in as
    many parts, R and P with them, that do not wait for each other: one can be exchanged while another is computed.
    Whether that happens is the compiler's choice: what it schedules for H100 overlaps (but small all-gathers of ring's
    chunks it joins into one), for v5p it does so only when told to, for example by xla_tpu_enable_async_all_to_all.

    Raises ValueError on an unknown method, on shapes that do not fit, or where something does not divide.
    """
    if method not in METHODS:
        raise ValueError(f"exchange: method {method!r} is not known; choose one of {sorted(METHODS)}")
    if x_ND.ndim != 2 or weights_NC.shape != indices_NC.shape or x_ND.shape[0] != indices_NC.shape[0]:
        raise ValueError(
            f"exchange: tokens {x_ND.shape}, weights {weights_NC.shape} and indices {indices_NC.shape} do not fit;"
            " pass [N, D], [N, C] and [N, C]"
        )
    devices = jax.lax.axis_size(axis_name)
    if num_experts % devices:
        raise ValueError(f"exchange: {num_experts} experts do not divide over {devices} devices of axis {axis_name!r}")
    if len(x_ND) % chunks:
        raise ValueError(f"exchange: {len(x_ND)} tokens do not divide into {chunks} chunks")
    if capacity_factor is not None and (method != "capacity" or capacity_factor <= 0):
        raise ValueError(f"exchange: capacity_factor {capacity_factor} with {method!r}; 'capacity' alone has one, > 0")
    options = {} if capacity_factor is None else {"factor": capacity_factor}
    parts = (a.reshape(chunks, -1, a.shape[1]) for a in (x_ND, weights_NC, indices_NC))
    # A loop in Python: a scan would have each chunk wait for the one before.
    results = [METHODS[method](*part, experts, num_experts, axis_name, **options) for part in zip(*parts, strict=True)]
    outs, dropped = zip(*results, strict=True)
    # Summed for every method, so that what is returned varies over the same mesh axes and one out_specs fits them all.
    return jnp.concatenate(outs), jax.lax.psum(sum(dropped), axis_name)
