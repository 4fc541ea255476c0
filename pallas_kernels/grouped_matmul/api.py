"""The public function: checks its arguments, then calls one backend by name."""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import reference, xla

BACKENDS = {"xla": xla.grouped_matmul, "reference": reference.grouped_matmul}


def grouped_matmul(x_PD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, *, backend: str = "xla") -> jax.Array:
    """out_PF[p] = x_PD[p] @ w_EDF[e], where the first sizes_E[0] rows belong to e = 0, the next sizes_E[1] to 1, …

    `sizes_E` is int32. Rows past the sum of the sizes give zero. Differentiable in `x_PD` and `w_EDF`. Raises
    ValueError on an unknown backend or on shapes that do not fit.
    """
    if backend not in BACKENDS:
        raise ValueError(f"grouped_matmul: backend {backend!r} is not known; choose one of {sorted(BACKENDS)}")
    if x_PD.ndim != 2 or w_EDF.ndim != 3 or x_PD.shape[1] != w_EDF.shape[1] or sizes_E.shape != w_EDF.shape[:1]:
        raise ValueError(
            f"grouped_matmul: rows {x_PD.shape}, matrices {w_EDF.shape} and sizes {sizes_E.shape} do not fit;"
            " pass [P, D], [E, D, F] and [E]"
        )
    if not jnp.issubdtype(sizes_E.dtype, jnp.integer):
        raise ValueError(f"grouped_matmul: sizes are {sizes_E.dtype}; pass whole numbers of rows, int32")
    return BACKENDS[backend](x_PD, w_EDF, sizes_E)
