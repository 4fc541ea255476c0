"""Tokens to the experts they chose and back, on one device and over a mesh axis of experts."""

from pallas_kernels.dispatch.api import METHODS, combine, exchange, gather, sort_by_expert

__all__ = ["METHODS", "combine", "exchange", "gather", "sort_by_expert"]
