"""Skips, by name, what wants a compiler that is not installed."""

import pytest

from pallas_kernels import aot


def needs_compiler(chip: str) -> None:
    """Skips the test where the compiler for `chip` is not installed."""
    try:
        aot.devices(chip)
    except RuntimeError as error:
        pytest.skip(str(error).splitlines()[0])
