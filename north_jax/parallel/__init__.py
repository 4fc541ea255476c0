"""The device mesh and the one table that lays logical axes on it."""

from north_jax.parallel.mesh import AXES, make_mesh
from north_jax.parallel.sharding import (
    batch_sharding,
    on_shards,
    parameter_shardings,
    parts,
    shard_model,
    spec,
    whole,
)

__all__ = [
    "AXES",
    "batch_sharding",
    "make_mesh",
    "on_shards",
    "parameter_shardings",
    "parts",
    "shard_model",
    "spec",
    "whole",
]
