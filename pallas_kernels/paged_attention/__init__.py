"""Attention of a few queries per row over a cache in pages."""

from pallas_kernels.paged_attention.api import BACKENDS, paged_attention

__all__ = ["BACKENDS", "paged_attention"]
