"""Writing a checkpoint folder: tensor after tensor, never a whole shard in memory, visible only when complete.

Everything goes into a folder beside the target, which is renamed into place at the end. A writer that resumes goes on
after the last part (a shard, or an item of an Orbax folder) that was finished.
"""

import collections
import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import xxhash
from tqdm import tqdm

from north_jax.weights.folder import DTYPES, INDEX, MANIFEST, WEIGHTS, checksum, json_checksum, read_header

SHARD_BYTES = 1_500_000_000  # one layer of North at full width is 1.25 GB
AHEAD_BYTES = 256_000_000  # made and not yet written
_JOURNAL = "finished.jsonl"
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Planned:
    """One tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


Unit = tuple[Planned, ...]  # tensors that are made together, and lie in one shard


def shards_of(plan: Sequence[Unit], max_bytes: int) -> dict[str, list[Unit]]:
    """File name -> its units, in order; no file larger than `max_bytes` unless it holds a single unit."""
    shards: list[list[Unit]] = [[]]
    held = 0
    for unit in plan:
        if shards[-1] and held + nbytes(unit) > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(unit)
        held += nbytes(unit)
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def nbytes(tensors: Iterable[Planned]) -> int:
    """Bytes of all of them."""
    return sum(tensor.nbytes for tensor in tensors)


class FolderWriter:
    """A folder in the making, as a context manager: `path` appears, complete, when the block ends without an error.

    replace: whether a folder already at `path` may be replaced; FileExistsError otherwise. resume: a text that says
    what is being written; what an earlier writer with the same text left unfinished is continued. Without it, or with
    another text, that is removed. finished: part -> what `finish` was told of it.
    """

    def __init__(self, path: str | os.PathLike, *, replace: bool, resume: str | None = None):
        self.path = pathlib.Path(path).absolute()
        self.partial = self.path.with_name(f".{self.path.name}.partial")
        self._replaced = self.path.with_name(f".{self.path.name}.replaced")
        self._replace, self._resume = replace, resume
        self.finished: dict[str, dict] = {}

    def __enter__(self) -> "FolderWriter":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # What a writer that was killed left behind; between its two renames the old folder is still the good one.
        if self._replaced.exists() and not self.path.exists():
            self._replaced.rename(self.path)
        shutil.rmtree(self._replaced, ignore_errors=True)
        if self.path.exists() and not self._replace:
            raise FileExistsError(f"{self.path} exists already; choose another place, or remove it first")
        journal = self.partial / _JOURNAL
        if self._resume is not None and journal.exists():
            what, *parts = _lines(journal) or [None]
            if what == {"what": self._resume}:
                self.finished = {part["part"]: part["about"] for part in parts}
                return self
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir()
        journal.write_text(json.dumps({"what": self._resume}) + "\n")
        return self

    def finish(self, part: str, about: dict) -> None:
        """Notes that a part is whole, so that a resumed writer need not make it again."""
        self.finished[part] = about
        with (self.partial / _JOURNAL).open("a") as journal:
            journal.write(json.dumps({"part": part, "about": about}) + "\n")

    def __exit__(self, kind, error, _) -> None:
        if error is not None:
            if self._resume is None:
                shutil.rmtree(self.partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise OSError(
                    f"checkpoint {self.path} could not be written ({error}); free disk space and run again"
                ) from error
            return
        (self.partial / _JOURNAL).unlink(missing_ok=True)
        if self.path.exists():
            self.path.rename(self._replaced)
        self.partial.rename(self.path)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def json(self, name: str, value) -> None:
        """Writes a JSON file."""
        (self.partial / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

    def carry(self, source: str | os.PathLike) -> None:
        """Copies, byte for byte, what a checkpoint folder has beside weights and config: tokenizer, template, …"""
        for file in sorted(pathlib.Path(source).iterdir()):
            own = file.name.startswith(("model.", "model-", "config.json", "north_", "."))
            if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model", ".md", "") and not own:
                shutil.copyfile(file, self.partial / file.name)

    def weights(
        self,
        plan: Sequence[Unit],
        produce: Callable[[Unit], Sequence[np.ndarray]],
        *,
        max_shard_bytes: int = SHARD_BYTES,
        threads: int = 1,
    ) -> dict[str, str]:
        """Writes all tensors in the plan's order and the index; returns their checksums by name.

        `produce` makes the tensors of a unit. It is called in `threads` threads, ahead of the writing by a bounded
        number of bytes; with one thread strictly in order.
        """
        shards = shards_of(plan, max_shard_bytes)
        missing = {file: shard for file, shard in shards.items() if file not in self.finished}
        total = sum(map(nbytes, plan))
        if len(shards) > 1:
            weight_map = {tensor.name: file for file, shard in shards.items() for unit in shard for tensor in unit}
            self.json(INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        left = [unit for shard in missing.values() for unit in shard]
        with (
            ThreadPoolExecutor(threads, "produce") as pool,
            progress(self.path.name, total, total - sum(map(nbytes, left))) as bar,
        ):
            made = _ahead(pool, produce, left)
            for file, shard in missing.items():
                self.finish(file, _write_shard(self.partial / file, shard, made, bar))
        return {name: value for file in shards for name, value in self.finished[file].items()}

    def manifest(self, *, version: str | int, step: int, **checksums) -> None:
        """Writes the manifest with the given checksums; call it last. It adds those of all files, and its own."""
        files = {}
        for file in sorted(self.partial.iterdir()):
            if file.is_dir() or file.name in (MANIFEST, _JOURNAL):
                continue
            # Of weights their headers; the tensors have their own.
            read = read_header if file.name.endswith(".safetensors") else pathlib.Path.read_bytes
            files[file.name] = xxhash.xxh3_64_hexdigest(read(file))
        about = {"weight_version": str(version), "step": step, "files": files, **checksums}
        self.json(MANIFEST, about | {"self": json_checksum(about)})


def progress(name: str, total: int, done: int = 0) -> tqdm:
    """A progress bar in bytes, for work that takes more than a few seconds."""
    return tqdm(total=total, initial=done, desc=f"writing {name}", unit="B", unit_scale=True, delay=3.0)


def _lines(path: pathlib.Path) -> list[dict]:
    # The last one may have been cut off by the death of its writer.
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _header(tensors: Sequence[Planned]) -> bytes:
    # The safetensors format: length of the header, header, then the tensors without a gap.
    about: dict = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        about[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_shard(
    path: pathlib.Path, units: Sequence[Unit], made: Iterator[Sequence[np.ndarray]], bar
) -> dict[str, str]:
    checksums = {}
    with path.open("wb", buffering=0) as file:
        file.write(_header([tensor for unit in units for tensor in unit]))
        for unit in units:
            for tensor, value in zip(unit, next(made), strict=True):
                if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
                    raise ValueError(
                        f"{tensor.name} came as {value.dtype}{list(value.shape)} where"
                        f" {tensor.dtype}{list(tensor.shape)} was planned"
                    )
                value = np.ascontiguousarray(value)
                checksums[tensor.name] = checksum(value)
                data = memoryview(value.reshape(-1).view(np.uint8))
                while len(data):
                    data = data[file.write(data) :]
                bar.update(tensor.nbytes)
        os.fsync(file.fileno())
    return checksums


def _ahead(pool: ThreadPoolExecutor, produce: Callable, units: Sequence[Unit]) -> Iterator[Sequence[np.ndarray]]:
    """produce(unit) for each in order, up to AHEAD_BYTES of them made before they are asked for."""
    waiting: collections.deque[tuple[Unit, Future]] = collections.deque()
    ahead = 0
    for unit in units:
        while waiting and ahead + nbytes(unit) > AHEAD_BYTES:
            first, future = waiting.popleft()
            ahead -= nbytes(first)
            yield future.result()
        waiting.append((unit, pool.submit(produce, unit)))
        ahead += nbytes(unit)
    while waiting:
        yield waiting.popleft()[1].result()
