"""The device mesh and the one table that lays logical axes on it."""

from north_jax.parallel.mesh import AXES, make_mesh
from north_jax.parallel.sharding import batch_sharding, parameter_shardings, shard_model, spec

__all__ = ["AXES", "batch_sharding", "make_mesh", "parameter_shardings", "shard_model", "spec"]
