"""Matrix products of consecutive groups of rows, each with its own matrix (the experts of a mixture)."""

from pallas_kernels.grouped_matmul.api import BACKENDS, gated_grouped_matmul, grouped_matmul

__all__ = ["BACKENDS", "gated_grouped_matmul", "grouped_matmul"]
