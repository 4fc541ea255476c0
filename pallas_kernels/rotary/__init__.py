"""Rotary positions on interleaved pairs: dimensions 2i and 2i+1 of a head turn together."""

from pallas_kernels.rotary.api import BACKENDS, angles, rotate

__all__ = ["BACKENDS", "angles", "rotate"]
