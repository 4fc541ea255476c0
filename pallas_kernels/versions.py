"""What is written differently under the versions of jax in use, 0.10 and 0.11."""

import inspect

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

_WHOLE = ((),) if inspect.signature(plgpu.load).parameters["idx"].default is inspect.Parameter.empty else ()


def load(ref, layout) -> jax.Array:
    """All of a Mosaic GPU reference, in a layout. jax 0.10 wants an index, which is deprecated from 0.11 on."""
    return plgpu.load(ref, *_WHOLE, layout=layout)
