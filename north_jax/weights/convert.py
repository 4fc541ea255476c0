"""Conversions between checkpoint folders on a machine without an accelerator: never more than one layer in memory.

Hugging Face -> Orbax (parameters as the decoder holds them), Orbax -> Hugging Face, and Hugging Face -> Hugging Face
(cast, cut into other shards, quantise).
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from flax import nnx

from north_jax.model import Decoder, ModelConfig
from north_jax.weights import hf, orbax_folder, quantize
from north_jax.weights.export import AHEAD_BYTES, SHARD_BYTES, FolderWriter, Planned, Unit, nbytes, progress
from north_jax.weights.folder import Folder, drop_cache, is_orbax, read_config, read_manifest
from north_jax.weights.names import Entry, by_parameter, manifest

ERRORS = "quantization_errors.jsonl"
_CACHED_BYTES = 500_000_000  # read and written before it is taken out of the page cache
_PROCESS_BYTES = 500_000_000  # the interpreter and its libraries


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a conversion will do. kinds: kind of tensor -> (tensors read, bytes read, bytes written)."""

    kinds: dict[str, tuple[int, int, int]]
    disk_bytes: int
    memory_bytes: int

    def table(self) -> str:
        """The plan as text."""
        rows = [(kind, *numbers) for kind, numbers in self.kinds.items()]
        rows.append(("total", *(sum(column) for column in zip(*self.kinds.values(), strict=True))))
        lines = [f"{'':12s}{'tensors':>9s}{'read':>12s}{'written':>12s}"]
        lines += [f"{kind:12s}{count:9,d}{_size(read):>12s}{_size(write):>12s}" for kind, count, read, write in rows]
        lines.append(f"disk: {_size(self.disk_bytes)}; memory: about {_size(self.memory_bytes)}")
        return "\n".join(lines)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def _kind(name: str) -> str:
    for part, kind in (
        ("self_attn", "attention"),
        (".experts.", "experts"),
        ("mlp.gate.", "router"),
        (".mlp.", "dense"),
    ):
        if part in name:
            return kind
    return "embedding" if "embed" in name else "norms"


class _Source:
    """A folder of either kind as disk tensors: shapes, types, and `read`, which any thread may call."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.orbax = is_orbax(path)
        self.folder = None if self.orbax else Folder(path)
        self.config: ModelConfig = read_config(path) if self.orbax else self.folder.config
        self.model = nnx.eval_shape(lambda: Decoder(self.config, rngs=nnx.Rngs(0)))
        self.entries: dict[str, Entry] = manifest(self.model)
        if self.orbax:
            self._stored = orbax_folder.stored(path, self.model)
            read = functools.partial(orbax_folder.read_array, path, sums=orbax_folder.read_sums(path))
            self._array = functools.lru_cache(maxsize=2)(read)
            self._lock = threading.Lock()
        else:
            hf.check(self.entries, {name: self.folder.shape(name) for name in self.folder.names()}, str(path))

    def __enter__(self) -> "_Source":
        return self

    def __exit__(self, *error) -> None:
        if self.folder is not None:
            self.folder.__exit__(*error)

    def dtype(self, name: str) -> np.dtype:
        return self._stored[self.entries[name].path].dtype if self.orbax else self.folder.dtype(name)

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> np.ndarray:
        if not self.orbax:
            return self.folder.read(name, rows, columns)
        entry = self.entries[name]
        stored = self._stored[entry.path]
        with self._lock:  # so that two threads do not read the same parameter
            value = self._array(stored.item, stored.name)
        return hf.to_matrix(value if entry.expert is None else value[entry.expert], entry)

    def nbytes(self, name: str) -> int:
        return Planned(name, self.entries[name].shape, self.dtype(name)).nbytes

    @property
    def version(self) -> tuple[str, int]:
        """(weight version, training step) of its manifest."""
        about = read_manifest(self.path)
        return str(about.get("weight_version", "0")), int(about.get("step", 0))


def convert(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    to: str = "hf",
    dtype: str | None = None,
    scheme: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    say: Callable[[str], None] = print,
    dry_run: bool = False,
) -> Plan:
    """Converts the folder `source`, a Hugging Face or an Orbax one, into the new folder `target` of kind `to`.

    dtype: the type of all tensors, instead of what they have. scheme: a name of `quantize.SCHEMES`. `say` is given the
    plan; with dry_run that is all. A conversion that was cut off is continued by the same call.

    Raises CheckpointError for a source that is damaged, FileExistsError for a target that is there, ValueError for a
    combination that makes no sense, OSError when the disk is too small (before anything is written) or fails.
    """
    source, target = pathlib.Path(source), pathlib.Path(target).absolute()
    if to not in ("hf", "orbax"):
        raise ValueError(f"cannot convert to {to!r}: use 'hf' or 'orbax'")
    if scheme is not None and (to != "hf" or scheme not in quantize.SCHEMES):
        raise ValueError(
            f"cannot quantise as {scheme!r} into a folder of kind {to!r}: quantised folders are of kind 'hf', and the"
            f" schemes are {', '.join(quantize.SCHEMES)}"
        )
    if target.exists():
        raise FileExistsError(f"{target} exists already; choose another place, or remove it first")
    with _Source(source) as origin:
        return _convert(origin, target, to, dtype, scheme, max_shard_bytes, say, dry_run)


def _convert(
    origin: _Source,
    target: pathlib.Path,
    to: str,
    dtype: str | None,
    scheme: str | None,
    max_shard_bytes: int,
    say: Callable[[str], None],
    dry_run: bool,
) -> Plan:
    types = {name: np.dtype(dtype) if dtype else origin.dtype(name) for name in origin.entries}
    chosen = quantize.SCHEMES[scheme] if scheme else None
    units = {name: _unit(name, origin.entries[name].shape, types[name], chosen) for name in origin.entries}
    plan = _plan(origin, units, to)
    say(plan.table())
    if dry_run:
        return plan
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    left = plan.disk_bytes - _present(target)
    if left > free:
        raise OSError(f"{target.parent} has {_size(free)} free where {_size(left)} are needed; make room there")
    what = f"{origin.path.absolute()} -> {to}, dtype {dtype}, scheme {scheme}, shards of {max_shard_bytes}"
    with FolderWriter(target, replace=False, resume=what) as writer:
        quantization = None if chosen is None else quantize.config(chosen, quantize.IGNORE)
        hf.write_configs(writer, origin.config, types["model.embed_tokens.weight"], origin.path, quantization)
        version, step = origin.version
        if to == "orbax":
            sums = _write_items(writer, origin, types)
            writer.manifest(version=version, step=step, bit_sums=sums)
            return plan
        lock = threading.Lock()  # a text file is not for many threads at once
        passed = _Passed(origin.path, writer.partial)

        def produce(unit: Unit) -> Sequence[np.ndarray]:
            name = unit[0].name.removesuffix("_packed")
            value = origin.read(name).astype(types[name], copy=False)
            passed(value.nbytes)
            if len(unit) == 1:
                return [value]
            made = quantize.quantise(name, value, chosen)
            error = quantize.error(value, quantize.dequantise(made, chosen, types[name]))
            with lock:
                errors.write(json.dumps({"tensor": name, **error}) + "\n")
            return [made[tensor.name] for tensor in unit]

        with (writer.partial / ERRORS).open("a") if chosen else contextlib.nullcontext() as errors:
            plan_units = list(units.values())
            checksums = writer.weights(plan_units, produce, max_shard_bytes=max_shard_bytes, threads=hf.THREADS)
        if chosen:
            say(_error_summary(writer.partial / ERRORS))
        writer.manifest(version=version, step=step, checksums=checksums)
    return plan


def _unit(name: str, shape: tuple[int, ...], dtype: np.dtype, scheme: quantize.Scheme | None) -> Unit:
    if scheme is None or not quantize.is_quantised(name):
        return (Planned(name, shape, dtype),)
    return tuple(Planned(part, *about) for part, about in quantize.shapes(name, shape, dtype, scheme).items())


def _plan(origin: _Source, units: dict[str, Unit], to: str) -> Plan:
    kinds: dict[str, tuple[int, int, int]] = {}
    for name, unit in units.items():
        count, read, written = kinds.get(_kind(name), (0, 0, 0))
        kinds[_kind(name)] = count + 1, read + origin.nbytes(name), written + nbytes(unit)
    size = {path: sum(nbytes(units[name]) for name in names) for path, names in by_parameter(origin.entries).items()}
    if to == "orbax":
        items = orbax_folder.items(origin.model).values()
        held = max(_held(sum(size[path] for path, _ in params.values())) for params in items)
    else:
        held = sum(sorted(size.values())[-2:]) if origin.orbax else max(map(nbytes, units.values()))
        held += AHEAD_BYTES
    return Plan(kinds, sum(map(nbytes, units.values())), held + _PROCESS_BYTES)


def _present(target: pathlib.Path) -> int:
    partial = target.with_name(f".{target.name}.partial")
    return sum(file.stat().st_size for file in partial.rglob("*") if file.is_file()) if partial.exists() else 0


def _write_items(writer: FolderWriter, origin: _Source, types: dict[str, np.dtype]) -> dict[str, int]:
    """Writes the parameters item by item; returns their bit sums. One item is read while another is written."""
    passed = _Passed(origin.path, writer.partial)
    names = by_parameter(origin.entries)
    items = orbax_folder.items(origin.model)
    size = {
        item: sum(param.size * types[names[path][0]].itemsize for path, param in params.values())
        for item, params in items.items()
    }
    most = max(map(_held, size.values()))
    left = [item for item in items if item not in writer.finished]

    spare: list[np.ndarray] = []  # written; to be filled again, as the system would have to clear new memory

    def read(item: str) -> dict[str, np.ndarray]:
        arrays = {}
        for name, (path, param) in items[item].items():
            first = names[path][0]
            dtype = types[first]
            if not origin.entries[first].inputs:  # it lies on disk as it is here
                arrays[name] = origin.read(first).astype(dtype, copy=False)
                continue
            fits = [i for i, array in enumerate(spare) if array.size == param.size and array.dtype == dtype]
            out = (spare.pop(fits[0]) if fits else np.empty(param.size, dtype)).reshape(param.shape)
            hf.read_parameter(out, names[path], origin.entries, origin.read, threads)
            arrays[name] = out
        return arrays

    with (
        ThreadPoolExecutor(hf.THREADS, "read") as threads,
        ThreadPoolExecutor(1, "next") as ahead,
        progress(writer.path.name, sum(size.values())) as bar,
    ):
        bar.update(sum(size.values()) - sum(size[item] for item in left))
        following = None
        for item, after in zip(left, [*left[1:], None], strict=True):
            arrays = following.result() if following else read(item)
            # Not beside the embedding: that alone takes all the memory the plan has named.
            early = after is not None and _held(size[item]) + size[after] <= most
            following = ahead.submit(read, after) if early else None
            writer.finish(item, orbax_folder.write_item(writer.partial, item, arrays))
            passed(size[item])
            if early:
                spare += arrays.values()
            del arrays  # before the next are made
            bar.update(size[item])
    return {name: value for item in items for name, value in writer.finished[item].items()}


class _Passed:
    """Counts bytes, and takes the folders out of the page cache from time to time.

    A conversion looks at nothing twice: its pages would only push out others, and fresh ones cost more than old.
    """

    def __init__(self, *folders: pathlib.Path):
        self._folders, self._bytes, self._lock = folders, 0, threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            if self._bytes < _CACHED_BYTES:
                return
            self._bytes = 0
            for folder in self._folders:
                drop_cache(folder)


def _held(size: int) -> int:
    """Memory for an item of this size, in bytes: itself, and what Orbax has of it under way."""
    return size + min(size, orbax_folder.IN_FLIGHT_GB * 10**9)


def _error_summary(path: pathlib.Path) -> str:
    errors = {}
    for line in path.read_text().splitlines():  # a resumed run may have done some twice
        record = json.loads(line)
        errors[record.pop("tensor")] = record
    path.write_text("".join(json.dumps({"tensor": name, **errors[name]}) + "\n" for name in sorted(errors)))
    relative = np.array([error["relative"] for error in errors.values()])
    worst = max(errors, key=lambda name: errors[name]["relative"])
    return (
        f"{len(errors):,} matrices quantised, relative error {np.median(relative):.4f} (median),"
        f" {errors[worst]['relative']:.4f} at worst ({worst}); all in {ERRORS}"
    )
