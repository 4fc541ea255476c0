"""Grouped-query attention over a span of keys per query: causal, windowed, packed, or a piece of any of these."""

from pallas_kernels.attention.api import BACKENDS, attention, spans

__all__ = ["BACKENDS", "attention", "spans"]
