"""The rules of differentiation that the backends with kernels share: what is saved, which functions give the gradients.

A backend is a module with gmm, gradients, gated and gated_gradients; see `tpu`.
"""

from collections.abc import Callable

import jax


def grouped_matmul(backend, **how) -> Callable:
    """(x_PD, w_EDF, sizes_E) -> out_PF by the backend, to which `how` goes with every call."""

    @jax.custom_vjp
    def product(x_PD, w_EDF, sizes_E):
        return backend.gmm(x_PD, w_EDF, sizes_E, **how)

    product.defvjp(
        lambda *arguments: (product(*arguments), arguments),
        lambda saved, d_PF: (*backend.gradients(*saved, d_PF, **how), None),
    )
    return product


def gated_grouped_matmul(backend, **how) -> Callable:
    """(x_PD, gate_EDF, up_EDF, sizes_E) -> silu(a) b, a = x gate, b = x up, as `grouped_matmul`.

    Differentiated, it saves a and b instead of multiplying again: under a checkpoint of the layer they live for one
    layer, and to write and read them (4 P F numbers) costs less than two products a second time.
    """

    @jax.custom_vjp
    def product(x_PD, gate_EDF, up_EDF, sizes_E):
        return backend.gated(x_PD, gate_EDF, up_EDF, sizes_E, save=False, **how)[0]

    def save(*arguments):
        hidden_PF, a_PF, b_PF = backend.gated(*arguments, save=True, **how)
        return hidden_PF, (*arguments, a_PF, b_PF)

    product.defvjp(save, lambda saved, d_PF: (*backend.gated_gradients(*saved, d_PF, **how), None))
    return product
