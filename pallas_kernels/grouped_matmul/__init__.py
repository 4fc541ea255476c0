"""Matrix products of consecutive groups of rows, each with its own matrix (the experts of a mixture)."""

from pallas_kernels.grouped_matmul.api import BACKENDS, grouped_matmul

__all__ = ["BACKENDS", "grouped_matmul"]
