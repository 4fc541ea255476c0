"""Skips, by name, what wants a compiler that is not installed; and the collectives of a compiled text."""

import math
import re
from collections.abc import Collection

import pytest

from pallas_kernels import aot


def needs_compiler(chip: str) -> None:
    """Skips the test where the compiler for `chip` is not installed."""
    try:
        aot.devices(chip)
    except RuntimeError as error:
        pytest.skip(str(error).splitlines()[0])


# name -> the bytes that a collective over G devices sends, from the bytes that go in and come out of each.
SENT = {
    "all-gather": lambda G, given, taken: taken - given,
    "reduce-scatter": lambda G, given, taken: given - taken,
    "all-to-all": lambda G, given, taken: given * (G - 1) // G,
    "ragged-all-to-all": lambda G, given, taken: min(given, taken),  # at most: every row to other devices
}
BYTES = {"bf16": 2, "f32": 4, "s32": 4}


def collectives(text: str) -> list[tuple[str, str]]:
    """(name, the shapes before it: what goes in, then what comes out) of those that a compiled text has.

    Those in SENT: all-reduces are what `reduced` finds.
    """
    names = "|".join(sorted(SENT, key=len, reverse=True))
    return [(name, shapes) for shapes, name in re.findall(rf"= (.*?) ({names})(?:-start)?\(", text)]


def reduced(text: str) -> list[str]:
    """The shapes of the all-reduces of a compiled text, in order."""
    return sorted(shapes for shapes in re.findall(r"= (.*?) all-reduce(?:-start)?\(", text))


def bytes_sent(text: str, devices: int, names: Collection[str] = tuple(SENT)) -> int:
    """What a device sends in the collectives of these names, all over as many devices, compiled for Hopper."""
    sent = 0
    for name, shapes in collectives(text):
        sizes = [
            BYTES[dtype] * math.prod(map(int, dims.split(",")))
            for dtype, dims in re.findall(r"(\w+)\[([\d,]+)\]", shapes)
            if dtype in BYTES
        ]
        half = 1 if name == "ragged-all-to-all" else len(sizes) // 2
        if name in names:
            sent += SENT[name](devices, sum(sizes[:half]), sum(sizes[half : 2 * half]))
    return sent
