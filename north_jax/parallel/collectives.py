"""What a compiled program sends between devices, read from its text: how often, over which mesh axes, and bytes."""

import dataclasses
import math
import re
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from jax.sharding import Mesh

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction: `count` runs of `bytes`, which is what a device sends each time, over the mesh `axes`.

    Within a branch that is taken sometimes, `count` may be a fraction: all instructions together have the true sum.
    all-gather, reduce-scatter, all-to-all: the (g-1)/g of the whole array in a group of g devices; all-reduce: twice
    that; collective-permute: the array; ragged-all-to-all: all that there is room for. `results`: type and shape of
    what comes out.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int | Fraction
    results: tuple[tuple[str, tuple[int, ...]], ...]


def collectives(text: str, mesh: Mesh, shares: Sequence[Fraction] = ()) -> list[Collective]:
    """Those of a compiled program's text (`jax.stages.Compiled.as_text`), with the loops they are in counted.

    A loop whose number of rounds the compiler does not know counts once. `shares`: how often each branch is taken, of
    every conditional with as many of them (`north_jax.model.blocks.shares`); of others all branches count.
    """
    computations, entry = _computations(text)
    found: list[Collective] = []

    def walk(name: str, count: int | Fraction) -> None:
        for shape, operation, rest in computations.get(name, ()):
            kind = operation.removesuffix("-start")
            if kind in KINDS:
                devices = _group(rest, mesh.size)
                given, results = _arrays(operation, kind, shape)
                taken = sum(map(_size, results))
                if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                    # How libtpu writes a reduce-scatter: a fusion in which each device keeps its slice of a sum.
                    kind, taken = "reduce-scatter", taken // len(devices)
                sent = _sent(kind, len(devices), sum(map(_size, given)), taken)
                found.append(Collective(kind, _axes(devices, mesh), sent, count, results))
            rounds = _rounds(rest, computations) if operation == "while" else 1
            for one, several in _CALLED.findall(rest):
                branches = (several or one).split(", ")
                known = shares if several and len(branches) == len(shares) else [1] * len(branches)
                for called, share in zip(branches, known, strict=True):
                    walk(called.lstrip("%"), count * rounds * share)

    walk(entry, 1)
    return found


def _computations(text: str) -> tuple[dict[str, list[tuple[str, str, str]]], str]:
    computations: dict[str, list[tuple[str, str, str]]] = {}
    entry, lines = "", None
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            lines = computations.setdefault(head.group(2), [])
            entry = head.group(2) if head.group(1) else entry
        elif lines is not None and (instruction := _INSTRUCTION.match(line)):
            lines.append(instruction.groups())
    return computations, entry


def _rounds(rest: str, computations: dict[str, list[tuple[str, str, str]]]) -> int:
    """As the compiler says; else, as loops count up from 0, the one number that the condition compares with."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', rest):
        return int(known.group(1))
    condition = re.search(r"condition=%?([\w.\-]+)", rest).group(1)
    numbers = {
        int(rest.partition(")")[0])
        for shape, operation, rest in computations.get(condition, ())
        if operation == "constant" and shape.startswith("s32[]")
    }
    return numbers.pop() if len(numbers) == 1 else 1


def _group(rest: str, devices: int) -> list[int]:
    """The devices of the first group, or of the first pair of a permutation."""
    if pairs := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", rest):
        return [int(device) for device in pairs.groups()]
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return [int(device) for device in listed.group(1).split(",")]
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        return _of_axes(*named.groups())
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        groups, sizes, order = (part and [int(n) for n in part.split(",")] for part in iota.groups())
        ids = np.arange(math.prod(sizes)).reshape(sizes)
        return (ids.transpose(order) if order else ids).reshape(groups)[0].tolist()
    return list(range(devices))


def _of_axes(mesh: str, chosen: str) -> list[int]:
    """The first group over axes of the compiler's own mesh; 'a':(2)4 is the part of 4 that lies below a's first 2."""
    sizes, varies = [], []
    for name, size in re.findall(r"('[^']+')=(\d+)", mesh):
        above, end = 1, int(size)
        for before, part in re.findall(rf"{name}(?::\((\d+)\)(\d+))?", chosen):
            before, part = int(before or 1), int(part or end)
            sizes += [before // above, part]
            varies += [False, True]
            above = before * part
        sizes.append(end // above)
        varies.append(False)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids[tuple(slice(None) if varied else 0 for varied in varies)].ravel().tolist()


def _axes(devices: list[int], mesh: Mesh) -> tuple[str, ...]:
    places = np.asarray(np.unravel_index(devices, mesh.devices.shape))
    return tuple(name for name, place in zip(mesh.axis_names, places, strict=True) if len(set(place.tolist())) > 1)


def _arrays(operation: str, kind: str, shape: str) -> tuple[tuple, tuple]:
    """(what goes in, as far as it is said, and what comes out) of the shape that stands before an instruction."""
    arrays = tuple((dtype, tuple(map(int, filter(None, dims.split(","))))) for dtype, dims in _ARRAY.findall(shape))
    if not operation.endswith("-start") or kind == "all-reduce":
        return (), arrays
    if kind == "ragged-all-to-all":  # rows, room for the result, and four tables before the result
        return arrays[:1], arrays[-1:]
    arrays = tuple(array for array in arrays if array != ("u32", ()))  # a permutation's counters
    half = len(arrays) // 2
    return arrays[:half], arrays[half:]


def _size(array: tuple[str, tuple[int, ...]]) -> int:
    dtype, shape = array
    bits = _BITS.get(dtype) or int(re.search(r"\d+", dtype).group())
    return math.prod(shape) * bits // 8


def _sent(kind: str, g: int, given: int, taken: int) -> int:
    if kind == "collective-permute":
        return taken
    if kind == "ragged-all-to-all":
        return min(given or taken, taken)
    if kind == "reduce-scatter":
        return taken * (g - 1)
    return taken * (g - 1) // g * (2 if kind == "all-reduce" else 1)
