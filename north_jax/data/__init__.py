"""Token sequences to training batches: best-fit packing and a Grain loader whose position can be saved exactly."""

from north_jax.data.loader import BatchIterator
from north_jax.data.packing import Example, Packed, best_fit, pack

__all__ = ["BatchIterator", "Example", "Packed", "best_fit", "pack"]
