"""Reads the schedules and register counts that compilers write down: what is known of a kernel without running it.

All of it is a static bound. A TPU kernel cannot be faster than its bundles, one a cycle; the compiler's own schedule
takes the cycles, and waiting for memory comes on top.
"""

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence

import jax

# libtpu's flags, for LIBTPU_INIT_ARGS of a process that has not loaded it yet; {folder} gets hundreds of megabytes.
DUMP = "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
# A shorter run of bundles is loop overhead.
LEAST_BUNDLES = 300


@dataclasses.dataclass(frozen=True)
class Body:
    """A run of bundles without a branch in it: one pass of a loop, mostly.

    mxu: the share of the matrix units' issue slots in use. spills: stores of registers that did not fit. cycles: its
    bundles before the compiler turned empty ones into delays, so the cycles that its own schedule takes: never fewer,
    and how many more differs from program to program.
    """

    kernel: str
    bundles: int
    mxu: float
    spills: int
    cycles: int


def bodies(folder: pathlib.Path) -> list[Body]:
    """The runs of bundles of every TPU kernel dumped to `folder` that use the matrix units, in program order."""
    found = []
    for path in sorted(folder.glob("*-final_hlo-static-per-bundle-utilization.txt")):
        stamp, kernel = re.match(r"(\d+)-(.*)-\d+-final_hlo", path.name).groups()

        def listed(what: str, stem: str = rf"{stamp}-{re.escape(kernel)}-\d+-") -> pathlib.Path:
            (one,) = (p for p in folder.iterdir() if re.fullmatch(stem + what, p.name))
            return one

        final = _runs(path, listed("final_bundles.txt"))
        planned = _runs(listed("pre-delay_hlo-static-per-bundle-utilization.txt"), listed("packed-bundles-post-ra.txt"))
        for (bundles, mxu, spills), (cycles, _, _) in zip(final, planned, strict=True):
            if bundles >= LEAST_BUNDLES and mxu:
                found.append(Body(kernel, bundles, mxu, spills, cycles))
    return found


def _runs(utilization: pathlib.Path, listing: pathlib.Path) -> list[tuple[int, float, int]]:
    """(bundles, share of the matrix units' slots in use, spill stores) of every run without a branch in it."""
    lines = utilization.read_text().splitlines()
    names, capacity = [name.strip() for name in lines[1].split(",")], [int(n) for n in lines[2].split()]
    rows = [[int(n) for n in line.split()] for line in lines[4:] if re.match(r"\s*\d", line)]
    mxu, spill = names.index("MXU"), names.index("VSTORE:SPILL")
    cuts = [0, *_branches(listing), len(rows)]
    found = []
    for run in (rows[start:end] for start, end in itertools.pairwise(cuts)):
        used = sum(row[mxu] for row in run)
        spills = sum(row[spill] if len(row) > spill else 0 for row in run)
        found.append((len(run), used / (len(run) * capacity[mxu]) if used else 0.0, spills))
    return found


def static_bound(bodies: Sequence[Body], passes: Sequence[int]) -> tuple[int, float] | None:
    """(bundles, share of the matrix units' slots) of a whole kernel: every body as often as `passes` says.

    None where the two do not match one to one: then only the bodies are known.
    """
    bundles = sum(body.bundles * n for body, n in zip(bodies, passes, strict=False))
    if len(bodies) != len(passes) or not bundles:
        return None
    return bundles, sum(body.mxu * body.bundles * n for body, n in zip(bodies, passes, strict=True)) / bundles


def vmem(folder: pathlib.Path) -> dict[str, int]:
    """Bytes of VMEM that the compiler gave each dumped kernel: scratch, windows of the pipeline, spilled registers."""
    found = {}
    for path in sorted(folder.glob("*-post-bundle-packing-post-ra.txt")):
        kernel = re.match(r"\d+-(.*)-\d+-post-bundle-packing-post-ra", path.name)[1]
        with path.open() as lines:
            places = [
                re.search(r"space=vmem, size = (0x[0-9a-f]+|\d+), offset = (0x[0-9a-f]+|\d+)", line)
                for line in lines
                if line.lstrip().startswith("#allocation")
            ]
        found[kernel] = max((int(m[1], 0) + int(m[2], 0) for m in places if m), default=0)
    return found


def _branches(listing: pathlib.Path) -> list[int]:
    """Where runs of bundles begin: after a branch, and at a label."""
    starts = set()
    address = 0
    for line in listing.read_text().splitlines():
        if head := re.match(r"\s*(0x[0-9a-f]+|0)\s+(\w\w)?\s*:", line):
            address = int(head[1], 16)
            if head[2]:
                starts.add(address)
        if "sbr.rel" in line:
            starts.add(address + 1)
    return sorted(starts)


@dataclasses.dataclass(frozen=True)
class Registers:
    """What ptxas says of one GPU kernel: registers of a thread at launch, and bytes spilled."""

    kernel: str
    registers: int
    spilled: int


def registers(log: str) -> list[Registers]:
    """The kernels in what MOSAIC_GPU_DUMP_PTXAS=1 prints."""
    pattern = re.compile(
        r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        re.S,
    )
    return [Registers(m[1], int(m[4]), int(m[2]) + int(m[3])) for m in pattern.finditer(log)]


def shared_memory(function: Callable, *arguments) -> dict[str, int]:
    """Bytes of shared memory that the scratch arrays of each Mosaic GPU kernel of a function take.

    Barriers, 8 bytes each, come on top.
    """
    found = {}
    for kernel in _equations(jax.make_jaxpr(function)(*arguments).jaxpr):
        if kernel.primitive.name != "mpmd_map":
            continue
        (outer, *_) = (e for body in kernel.params["jaxprs"] for e in _equations(body) if "ref_transforms" in e.params)
        arrays = [ref.aval.inner_aval for ref in outer.params["jaxpr"].invars if str(ref.aval.memory_space) == "smem"]
        sizes = [x.size * x.dtype.itemsize for x in arrays if hasattr(x.dtype, "itemsize")]
        found[kernel.params["name"]] = sum(sizes)
    return found


def _equations(program) -> Iterator:
    """The equations of a jaxpr, those of the ones inside included, outer ones first."""
    for equation in getattr(program, "jaxpr", program).eqns:
        yield equation
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from _equations(inner)
