"""Our kernels where the program is compiled for a TPU or for CUDA, XLA's product elsewhere: settled when it is lowered.

The choice lies inside the rules of differentiation: around them, each platform would save what the others need.
"""

import functools

import jax

from pallas_kernels.grouped_matmul import cpu, gpu, tpu, xla


def _chosen(name: str, *arguments, **options):
    """XLA's function of this name, or on a platform that has kernels for the first two's dtype its module's."""
    kernels = {"cpu": cpu, "tpu": tpu} | ({"cuda": gpu} if gpu.supports(*arguments[:2]) else {})
    branches = {platform: functools.partial(getattr(module, name), **options) for platform, module in kernels.items()}
    default = functools.partial(getattr(xla, name), **options)
    return jax.lax.platform_dependent(*arguments, **branches, default=default)


gmm, gradients, gated, gated_gradients = (
    functools.partial(_chosen, name) for name in ("gmm", "gradients", "gated", "gated_gradients")
)
