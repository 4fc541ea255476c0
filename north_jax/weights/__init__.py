"""Hugging Face folders and parameters, in both directions."""

from north_jax.weights.hf import CheckpointError, from_tensors, load, read_tensors, save, to_tensors

__all__ = ["CheckpointError", "from_tensors", "load", "read_tensors", "save", "to_tensors"]
