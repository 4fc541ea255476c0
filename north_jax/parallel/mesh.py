"""The named device mesh."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "expert", "context", "tensor")


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh of data x fsdp x expert x context x tensor devices; one size may be -1 and then takes what is left.

    `devices` defaults to all there are. Raises ValueError when the sizes do not multiply to their number.
    """
    devices = list(jax.devices() if devices is None else devices)
    wanted = (data, fsdp, expert, context, tensor)
    sizes = list(wanted)
    known = int(np.prod([size for size in sizes if size != -1]))
    if sizes.count(-1) == 1 and known and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if min(sizes) < 1 or int(np.prod(sizes)) != len(devices):
        named = " x ".join(f"{axis}={size}" for axis, size in zip(AXES, wanted, strict=True))
        raise ValueError(f"mesh {named} does not fit {len(devices)} devices; make the product of the sizes equal it")
    # Auto: the compiler places what this project does not name.
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
