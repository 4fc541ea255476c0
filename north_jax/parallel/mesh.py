"""The named device mesh."""

import math
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from north_jax.parallel.presets import preset as named

AXES = ("data", "fsdp", "expert", "context", "tensor")


def make_mesh(
    *,
    preset: str = "",
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh of data x fsdp x expert x context x tensor devices; one size may be -1 and then takes what is left.

    `preset` is a name of `north_jax.parallel.presets`, whose sizes it has; beside it sizes stay 1 or -1. `devices`
    defaults to all there are. Raises ValueError when the sizes do not multiply to their number, with sizes that would.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = dict(zip(AXES, (data, fsdp, expert, context, tensor), strict=True))
    if preset:
        if own := [f"{axis}={size}" for axis, size in sizes.items() if size not in (1, -1)]:
            raise ValueError(f"mesh preset {preset} has its sizes: leave out {', '.join(own)}, or the preset")
        sizes = dict.fromkeys(AXES, 1) | named(preset).sizes
    known = math.prod(size for size in sizes.values() if size != -1)
    left = [axis for axis, size in sizes.items() if size == -1]
    fits = len(left) <= 1 and known > 0 and (len(devices) % known == 0 if left else len(devices) == known)
    if not fits or any(size < 1 for size in sizes.values() if size != -1):
        if preset:
            raise ValueError(
                f"mesh preset {preset} is {known} devices and here are {len(devices)}: choose another or give the axes'"
                " sizes"
            )
        shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(f"mesh {shown} does not fit {len(devices)} devices; {_remedy(sizes, len(devices))}")
    sizes |= dict.fromkeys(left, len(devices) // known)
    # Not jax.make_mesh, which does not split an axis of the torus: 32 x 8 on the 16 x 16 chips of a v6e-256.
    placed = mesh_utils.create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=True)
    # Auto: the compiler places what this project does not name.
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _remedy(sizes: dict[str, int], devices: int) -> str:
    """What to change, one axis at a time."""
    if list(sizes.values()).count(-1) > 1:
        return "only one size can be -1"
    options = []
    for axis, size in sizes.items():
        rest = math.prod(other for name, other in sizes.items() if name != axis and other != -1)
        if size in (1, -1) or rest < 1 or devices % rest:
            continue
        several = divisors(devices // rest) if -1 in sizes.values() else [devices // rest]
        options.append(f"{axis}={one_of(several)}")
    return f"the others as they are, {', or '.join(options)} would" if options else f"their product must be {devices}"


def divisors(n: int) -> list[int]:
    return [size for size in range(1, n + 1) if n % size == 0]


def one_of(sizes: list[int]) -> str:
    """1, 2 or 4"""
    *most, last = map(str, sizes)
    return f"{', '.join(most)} or {last}" if most else last
