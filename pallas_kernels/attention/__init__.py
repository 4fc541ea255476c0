"""Grouped-query attention over a span of keys per query: causal, windowed, packed, or a piece of any of these."""

from pallas_kernels.attention.api import BACKENDS, attention, spans
from pallas_kernels.attention.rule import SAVED

__all__ = ["BACKENDS", "SAVED", "attention", "spans"]
