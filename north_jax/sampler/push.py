"""Weights on their way to servers: the folder staged and later removed, one server loaded and proved, and measured."""

import asyncio
import contextlib
import dataclasses
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from north_jax.sampler.checksums import FolderSums
from north_jax.sampler.client import SamplerClient


@dataclasses.dataclass(frozen=True)
class Push:
    """What one push did. Seconds of the slowest server; `pause_s` is from the first pause to the last continue.

    `export_s` is the caller's own, `stage_s` the copy to the RAM disk (0 without one), `prepare_s` the reading of the
    folder for the checksums it must give, before the pause; `load_s` and `verify_s` are within the pause. `nbytes` is
    the size of the weight files, `servers` and `ejected` the URLs that serve the version and that do not.
    """

    version: str
    nbytes: int
    servers: tuple[str, ...]
    ejected: tuple[str, ...]
    export_s: float
    stage_s: float
    prepare_s: float
    load_s: float
    verify_s: float
    pause_s: float

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes of weights that each server loaded per second."""
        return self.nbytes / 1e9 / max(self.load_s, 1e-9)


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Seconds that one server took."""

    load_s: float
    verify_s: float


async def load(client: SamplerClient, folder: Path, version: str, sums: FolderSums, timeout_s: float) -> Loaded:
    """Pauses the server, has it load `folder`, and proves that it did; the caller must let it continue.

    Errors: SamplerError naming what the server refused or which tensor differs, Lost when it went away,
    SamplerUnavailable after `timeout_s` seconds in one of the calls.
    """
    await client.pause("retract", timeout_s)
    began = time.perf_counter()
    await client.update_weights(str(folder), version, timeout_s=timeout_s)
    loaded = time.perf_counter()
    await prove(client, sums, timeout_s)
    return Loaded(loaded - began, time.perf_counter() - loaded)


async def prove(client: SamplerClient, sums: FolderSums, timeout_s: float) -> None:
    """Errors: SamplerError naming the first tensor of the server's memory that is not the folder's."""
    answer, server = await client.weight_checksums(timeout_s), await client.server_info(timeout_s)
    await asyncio.to_thread(sums.verify, answer, server, client.url)


async def prepare(client: SamplerClient, sums: FolderSums, timeout_s: float) -> None:
    """Reads of the folder what proving this server will need, while it still serves."""
    answer, server = await client.weight_checksums(timeout_s), await client.server_info(timeout_s)
    await asyncio.to_thread(sums.prepare, answer, server)


def weight_bytes(folder: Path) -> int:
    """Size of the safetensors files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


class WeightFolders:
    """The folders of the versions that may still be read, newest last; older ones are removed when nobody reads them.

    Only what lies below `root` (the run's exports) or was staged here is ever removed. ram: a directory on a RAM disk,
    to which folders are copied so that servers load from memory. Safe from any thread.
    """

    def __init__(self, root: str | os.PathLike | None = None, ram: str | os.PathLike | None = None):
        self._root = None if root is None else Path(root).resolve()
        self._ram = None if ram is None else Path(ram).resolve()
        self._versions: dict[str, list[Path]] = {}  # version -> exported folder, and its staged copy
        self._leases: Counter[str] = Counter()
        self._lock = threading.Lock()

    def stage(self, folder: str | os.PathLike, version: str) -> Path:
        """The folder from which servers load `version`: `folder`, or its complete copy on the RAM disk."""
        folder = Path(folder).resolve()
        paths = [folder]
        if self._ram is not None:
            staged, partial = self._ram / folder.name, self._ram / f".{folder.name}.partial"
            for stale in (staged, partial):
                shutil.rmtree(stale, ignore_errors=True)
            try:
                shutil.copytree(folder, partial)
            except OSError as error:
                shutil.rmtree(partial, ignore_errors=True)
                raise OSError(f"{folder} could not be staged in {self._ram} ({error}); free memory there") from error
            partial.rename(staged)
            paths.append(staged)
        with self._lock:
            self._versions.pop(version, None)
            self._versions[version] = paths
        return paths[-1]

    @contextlib.contextmanager
    def lease(self, version: str) -> Iterator[Path]:
        """The folder of `version`, which stays while the block runs. Errors: KeyError when it is gone already."""
        with self._lock:
            if version not in self._versions:
                raise KeyError(f"the folder of version {version} is not kept any more; lease it while it is served")
            path = self._versions[version][0]
            self._leases[version] += 1
        try:
            yield path
        finally:
            with self._lock:
                self._leases[version] -= 1

    def collect(self, served: set[str]) -> list[str]:
        """Removes every version but the newest, the `served` and the leased; the versions removed."""
        with self._lock:
            newest = next(reversed(self._versions), None)
            gone = [v for v in self._versions if v != newest and v not in served and not self._leases[v]]
            kept = {path for v, paths in self._versions.items() if v not in gone for path in paths}
            paths = [path for version in gone for path in self._versions.pop(version) if path not in kept]
        for path in paths:
            if any(home is not None and path != home and path.is_relative_to(home) for home in (self._root, self._ram)):
                shutil.rmtree(path, ignore_errors=True)
        return gone
