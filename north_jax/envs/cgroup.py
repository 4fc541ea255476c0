"""A control group (v1 or v2) that bounds the memory, processes and CPU of one sandbox."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

_CONTROLLERS = "memory", "pids", "cpu"
_PERIOD_US = 100_000
_counter = itertools.count()


class Cgroup:
    """The directories of one group (one per controller in v1, a single one in v2)."""

    def __init__(self, directories: list[Path]):
        self.directories = directories

    @property
    def procs_files(self) -> list[str]:
        """The files into which a process writes its id in order to enter."""
        return [str(directory / "cgroup.procs") for directory in self.directories]

    def remove(self, wait_s: float = 2.0) -> None:
        """Kill what is left inside and remove the group; what the kernel still holds after `wait_s` stays behind."""
        deadline = time.monotonic() + wait_s
        for directory in self.directories:
            while directory.exists():
                try:
                    for pid in (directory / "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
                    directory.rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.002)


def create(memory_bytes: int, pids: int, cpus: float) -> Cgroup | None:
    """A new group with these limits, or None where this process may not make one (then rlimits have to do)."""
    quota_us = int(cpus * _PERIOD_US)
    name = f"north_jax.{os.getpid()}.{next(_counter)}"
    v1, v2 = _mounted()
    if set(_CONTROLLERS) <= set(v1):
        settings = {
            "memory": {"memory.limit_in_bytes": memory_bytes, "memory.memsw.limit_in_bytes": memory_bytes},
            "pids": {"pids.max": pids},
            "cpu": {"cpu.cfs_period_us": _PERIOD_US, "cpu.cfs_quota_us": quota_us},
        }
        # Controllers mounted together (cpu,cpuacct) share a directory.
        merged: dict[Path, dict] = {}
        for controller in _CONTROLLERS:
            merged.setdefault(v1[controller], {}).update(settings[controller])
    elif v2 is not None:
        merged = {
            v2: {
                "memory.max": memory_bytes,
                "memory.swap.max": 0,
                "pids.max": pids,
                "cpu.max": f"{quota_us} {_PERIOD_US}",
            }
        }
    else:
        return None
    made: list[Path] = []
    try:
        for base, values in merged.items():
            _sweep(base)
            if base == v2:
                _delegate(base)
            directory = base / name
            directory.mkdir()
            made.append(directory)
            for file, value in values.items():
                # Without swap accounting the kernel has no file for it.
                if (directory / file).exists() or "sw" not in file:
                    (directory / file).write_text(str(value))
    except OSError:
        Cgroup(made).remove()
        return None
    return Cgroup(made)


def _mounted() -> tuple[dict[str, Path], Path | None]:
    """Where this process's own groups lie: {controller: directory} of v1, and the directory of v2."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path.lstrip("/")))
    v1, v2 = {}, None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ", 2)
        mount = Path(fields.split()[4])
        if kind == "cgroup":
            for controller in set(options.split(",")) & set(_CONTROLLERS):
                # Inside a container the path may be the host's and not exist below the mount.
                inside = mount / own.get(controller, "")
                v1[controller] = inside if inside.is_dir() else mount
        elif kind == "cgroup2":
            v2 = mount
    return v1, v2


def _delegate(base: Path) -> None:
    """Hand the controllers to the children of a v2 group; OSError where the kernel does not allow it."""
    missing = set(_CONTROLLERS) - set((base / "cgroup.subtree_control").read_text().split())
    if missing:
        (base / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in sorted(missing)))


def _sweep(base: Path) -> None:
    """Remove the groups of processes that were killed before they could."""
    for directory in base.glob("north_jax.*.*"):
        owner = directory.name.split(".")[1]
        if not Path("/proc", owner).exists():
            try:
                directory.rmdir()
            except OSError:
                continue
