"""Hugging Face folders and parameters, in both directions."""

from north_jax.weights.folder import CheckpointError, Folder, read_config
from north_jax.weights.hf import from_tensors, load, read_tensors, save, to_tensors

__all__ = ["CheckpointError", "Folder", "from_tensors", "load", "read_config", "read_tensors", "save", "to_tensors"]
