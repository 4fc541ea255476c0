"""The device mesh, the one table that lays logical axes on it, and the exchange between devices that share a row."""

from north_jax.parallel.context import chunk_length, to_natural, to_zigzag
from north_jax.parallel.mesh import AXES, make_mesh
from north_jax.parallel.presets import PRESETS
from north_jax.parallel.sharding import (
    batch_sharding,
    gathered_along,
    on_shards,
    parameter_shardings,
    parts,
    shard_model,
    spec,
    whole,
)

__all__ = [
    "AXES",
    "PRESETS",
    "batch_sharding",
    "chunk_length",
    "gathered_along",
    "make_mesh",
    "on_shards",
    "parameter_shardings",
    "parts",
    "shard_model",
    "spec",
    "to_natural",
    "to_zigzag",
    "whole",
]
