"""Logical axis -> mesh axis, in one table, and the shardings that follow from it."""

import math
from collections.abc import Callable, Collection, Sequence

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from north_jax.parallel.mesh import divisors, one_of

# A parameter axis that is on the left of two mesh axes is split over both.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "sequence": ("context",),
    "layer": (),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "router": (),
    "expert": ("expert",),
    "expert_mlp": ("tensor",),
}
# What a batch has and no parameter.
BATCH = ("batch", "sequence")


def spec(axes: Sequence[str | None]) -> PartitionSpec:
    """The mesh axes of an array whose dimensions have these logical names; one that has None is on all devices.

    Raises ValueError for an unknown name, or when two dimensions claim one mesh axis.
    """
    claimed: dict[str, str] = {}
    parts: list[tuple[str, ...] | None] = []
    for axis in axes:
        if axis is None:
            parts.append(None)
            continue
        if axis not in RULES:
            raise ValueError(f"logical axis {axis!r} is not in the sharding table RULES; use one of {sorted(RULES)}")
        for mesh_axis in RULES[axis]:
            if mesh_axis in claimed:
                raise ValueError(
                    f"axes {tuple(axes)}: {axis!r} and {claimed[mesh_axis]!r} both claim mesh axis {mesh_axis!r};"
                    " an array can be split over a mesh axis only once, so map one of them elsewhere in RULES"
                )
            claimed[mesh_axis] = axis
        parts.append(RULES[axis] or None)
    return PartitionSpec(*parts)


def parameter_shardings(mesh: Mesh, params: nnx.State) -> nnx.State:
    """A NamedSharding for every parameter of the state, in its structure, from the logical names each one carries.

    `params` are all of a model. Raises ValueError naming the parameter when a dimension does not divide over its mesh
    axes, with the sizes that all parameters would divide over, and for a mesh axis that splits nothing.
    """
    common = _common_sizes(params)
    _refuse_idle(mesh, common)

    def one(path, param: nnx.Param) -> nnx.Param:
        axes = param.get_metadata("axes")
        for axis, size in zip(axes, param.shape, strict=True):
            over = {mesh_axis: mesh.shape[mesh_axis] for mesh_axis in RULES[axis]}
            if size % math.prod(over.values()):
                name = ".".join(str(getattr(key, "key", key)) for key in path)
                fit = {at: one_of([n for n in divisors(common[at]) if n <= mesh.size]) for at in over}
                raise ValueError(
                    f"parameter {name} of shape {param.shape} does not divide over the mesh: {size} {axis} over"
                    f" {' x '.join(f'{at}={n}' for at, n in over.items())}; all parameters divide where"
                    f" {' and '.join(f'{at} is {sizes}' for at, sizes in fit.items())}"
                )
        return param.replace(NamedSharding(mesh, spec(axes)))

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _common_sizes(params: nnx.State) -> dict[str, int]:
    """Mesh axis -> the greatest common divisor of the dimensions that it splits."""
    common: dict[str, int] = {}
    for param in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        axes = param.get_metadata("axes")
        spec(axes)  # whose errors come first
        for axis, size in zip(axes, param.shape, strict=True):
            common |= {mesh_axis: math.gcd(common.get(mesh_axis, 0), size) for mesh_axis in RULES[axis]}
    return common


def _refuse_idle(mesh: Mesh, split: Collection[str]) -> None:
    """An axis of several devices is to split parameters that this model has; or rows, if the table says only that."""
    for mesh_axis, size in mesh.shape.items():
        claims = [axis for axis in RULES if mesh_axis in RULES[axis]]
        own = [axis for axis in claims if axis not in BATCH]
        if size > 1 and mesh_axis not in split and (own or not claims):
            why = f"none of them has an axis {' or '.join(own)}" if own else "the sharding table RULES does not have it"
            raise ValueError(
                f"mesh axis {mesh_axis}={size} splits no parameter of this model: {why}; set {mesh_axis} to 1 and give"
                " its devices to another axis"
            )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of every [B, S] array of a batch."""
    return NamedSharding(mesh, spec(("batch", "sequence")))


def on_shards(function: Callable, in_axes: Sequence[Sequence[str | None]], out_axes) -> Callable:
    """`function` run by every device on its own part of the arguments, whose dimensions have these logical names.

    `out_axes` are the names of what it returns, or a list of such names where it returns a tuple. The mesh is the one
    that is set where this is traced; without one, or on one device, it is `function` itself.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    out_specs = tuple(map(spec, out_axes)) if isinstance(out_axes, list) else spec(out_axes)
    return jax.shard_map(function, in_specs=tuple(map(spec, in_axes)), out_specs=out_specs, check_vma=False)


def parts(axis: str) -> int:
    """The number of parts that the mesh which is set here splits a logical axis into."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape.get(mesh_axis, 1) for mesh_axis in RULES[axis])


def whole(part: jax.Array, axes: Sequence[str | None], axis: str) -> jax.Array:
    """Inside `on_shards`: an array with these names, of which each device has a part, whole along `axis`.

    An all-gather, whose gradient is a reduce-scatter: each device is left with the sum of its own part.
    """
    if parts(axis) == 1:
        return part
    return jax.lax.all_gather(part, RULES[axis], axis=axes.index(axis), tiled=True)


def gathered_along(x: jax.Array, axes: Sequence[str | None], axis: str) -> jax.Array:
    """Outside `on_shards`, what `whole` is inside it: an array with these names, no longer split along `axis`."""
    if parts(axis) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, spec([None if name == axis else name for name in axes]))


def shard_model(mesh: Mesh, model: nnx.Module) -> None:
    """Lays the parameters of the model out on the mesh."""
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.device_put(params, parameter_shardings(mesh, params)))
