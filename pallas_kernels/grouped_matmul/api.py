"""The public functions: each checks its arguments, then calls one backend by name."""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import auto, gpu, reference, rule, tpu, xla
from pallas_kernels.grouped_matmul.tiles import CHIPS, tuned

BACKENDS = {"auto": auto, "gpu": gpu, "reference": reference, "tpu": tpu, "xla": xla, **dict.fromkeys(CHIPS, tpu)}


def grouped_matmul(x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, *, backend: str = "auto") -> jax.Array:
    """out_PF[p] = x_PD[p] @ w_EDF[e], where the first sizes_E[0] rows belong to e = 0, the next sizes_E[1] to 1, …

    `sizes_E` is int32. Rows past the sum of the sizes give zero. Differentiable in `x_PD` and `w_EDF`. `backend` is
    "xla", "tpu" (our kernels; bfloat16 or float32, in tiles that compile for all), the same in the tiles of a chip by
    its name ("v5e", "v5p", "v6e", "tpu7x"), "gpu" (ours for Hopper; bfloat16), "auto" (ours where the program is
    compiled for a TPU, for a CPU, or in bfloat16 for CUDA, else "xla") or "reference". Raises ValueError on an unknown
    backend, on a dtype that its kernels do not take, or on shapes that do not fit.
    """
    _check("grouped_matmul", backend, x_PD, w_EDF, sizes_E)
    if backend == "reference":
        return reference.grouped_matmul(x_PD, w_EDF, sizes_E)
    return rule.grouped_matmul(BACKENDS[backend], **_tiles(backend, x_PD))(x_PD, w_EDF, sizes_E)


def gated_grouped_matmul(
    x_PD: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    sizes_E: jax.Array,
    *,
    backend: str = "auto",
) -> jax.Array:
    """silu(x gate) * (x up), both products as in `grouped_matmul`, differentiable in `x_PD` and both matrices.

    "tpu" and "gpu" read x once for both and round once, at the end. Errors as in `grouped_matmul`.
    """
    _check("gated_grouped_matmul", backend, x_PD, gate_EDF, sizes_E)
    if gate_EDF.shape != up_EDF.shape:
        raise ValueError(f"gated_grouped_matmul: gates {gate_EDF.shape} and ups {up_EDF.shape} do not fit; pass equals")
    if backend == "reference":
        return reference.gated_grouped_matmul(x_PD, gate_EDF, up_EDF, sizes_E)
    return rule.gated_grouped_matmul(BACKENDS[backend], **_tiles(backend, x_PD))(x_PD, gate_EDF, up_EDF, sizes_E)


def _tiles(backend: str, x: jax.Array) -> dict:
    # Only in bfloat16 were any ranked.
    return {"tiles": tuned(backend)} if backend in CHIPS and x.dtype == jnp.bfloat16 else {}


def _check(name: str, backend: str, x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"{name}: backend {backend!r} is not known; choose one of {sorted(BACKENDS)}")
    if x_PD.ndim != 2 or w_EDF.ndim != 3 or x_PD.shape[1] != w_EDF.shape[1] or sizes_E.shape != w_EDF.shape[:1]:
        raise ValueError(
            f"{name}: rows {x_PD.shape}, matrices {w_EDF.shape} and sizes {sizes_E.shape} do not fit;"
            " pass [P, D], [E, D, F] and [E]"
        )
    if not jnp.issubdtype(sizes_E.dtype, jnp.integer):
        raise ValueError(f"{name}: sizes are {sizes_E.dtype}; pass whole numbers of rows, int32")
