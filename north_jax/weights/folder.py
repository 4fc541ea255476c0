"""A Hugging Face folder to read from: every tensor under its one name, checked before and while it is read.

Bytes come by plain reads into buffers of our own (a memory map would count every page read as resident memory), slices
only as far as the asking device needs them.
"""

import json
import os
import pathlib
import re
import threading
from collections.abc import Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open

from north_jax.model import ModelConfig
from north_jax.weights import quantize
from north_jax.weights.names import PREFIX, STACKED

WEIGHTS, INDEX, MANIFEST = "model.safetensors", "model.safetensors.index.json", "north_manifest.json"
PARAMETERS = "parameters"  # the folder that an Orbax folder has instead of WEIGHTS
DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
_FLOATS = tuple(DTYPES[name] for name in ("F32", "BF16", "F16"))
_PAGE = 4096  # bytes; what a disk reads at least


class CheckpointError(ValueError):
    """A folder that cannot be loaded: one sentence naming the file or tensor, and the remedy."""


class Stored(NamedTuple):
    """A tensor, or one matrix inside a stacked tensor, as it lies on disk."""

    name: str  # of the tensor on disk
    file: str
    offset: int  # in bytes, from the start of the file
    dtype: np.dtype
    shape: tuple[int, ...]
    whole: bool = True  # not a part of a stacked tensor


def drop_cache(path: pathlib.Path) -> None:
    """Takes what is on the disk of the files below `path` out of the page cache."""
    for file in path.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def is_orbax(path: str | os.PathLike) -> bool:
    """Whether a folder holds its parameters as `orbax_folder` writes them."""
    return (pathlib.Path(path) / PARAMETERS).is_dir()


def read_config(path: str | os.PathLike) -> ModelConfig:
    """The folder's `config.json`. Raises CheckpointError when it is missing, unreadable or not understood."""
    return _read_config(pathlib.Path(path))[0]


def _read_config(path: pathlib.Path) -> tuple[ModelConfig, quantize.Scheme | None]:
    file = path / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError(f"holds {type(raw).__name__}, not an object")
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist; give the folder of a Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); fetch it again") from None
    try:
        quantization = raw.pop("quantization_config", None)
        scheme = None if quantization is None else quantize.scheme_of(quantization)
        return ModelConfig.from_hf(raw), scheme
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from None


def read_manifest(path: pathlib.Path) -> dict:
    """The folder's `north_manifest.json`, empty when it has none: "weight_version", "step", and checksums.

    Raises CheckpointError when it, or one of the files whose checksum it has, is damaged or missing.
    """
    file = path / MANIFEST
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found.pop("self") != json_checksum(found):
            raise ValueError("its own checksum does not match")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); fetch it again, or remove it") from None
    for name, wanted in found["files"].items():
        if not (path / name).exists():
            raise CheckpointError(f"{path}: {MANIFEST} names {name}, which is not there; fetch that file")
        read = read_header if name.endswith(".safetensors") else pathlib.Path.read_bytes
        if xxhash.xxh3_64_hexdigest(read(path / name)) != wanted:
            raise CheckpointError(
                f"{path / name} is not the file that {MANIFEST} describes; fetch it again, or remove the"
                " manifest if the change was meant"
            )
    return found


class Folder:
    """The tensors of a checkpoint folder. Opening reads headers only; use as a context manager.

    stored: the tensors under the names of `names.TABLE`, whatever repack the folder is. A quantised matrix is one
    tensor here, by its weight's name; `read` gives it dequantised. bytes_read: read from the files so far.
    Every tensor read whole is compared with its checksum where the folder's `north_manifest.json` has one.

    Raises CheckpointError, one sentence, for a file that is missing, truncated, damaged, or in doubt.
    """

    def __init__(self, path: str | os.PathLike, *, check_finite: bool = False):
        self.path = pathlib.Path(path)
        self.manifest = read_manifest(self.path)
        self.config, self.scheme = _read_config(self.path)
        self.bytes_read = 0
        self._check_finite = check_finite
        self._lock = threading.Lock()
        self._files: dict[str, int] = {}
        self._checksums: Mapping[str, str] = self.manifest.get("checksums", {})
        self.raw = self._headers()
        self.stored = self._canonical()
        if odd := sorted(self._checksums.keys() ^ self.raw.keys()) if self._checksums else []:
            has, lacks = (MANIFEST, "the weights") if odd[0] in self._checksums else ("the weights", MANIFEST)
            raise CheckpointError(f"{self.path}: tensor {odd[0]} is in {has} but not in {lacks}; fetch the files again")

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    # -- what is there ------------------------------------------------------------------------------------------------

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, dequantised."""
        if self._is_quantised(name):
            return self._quantised_shape(name)
        return self.stored[name].shape

    def dtype(self, name: str) -> np.dtype:
        """Type that `read` gives the tensor in: what is stored, or the config's for a quantised matrix."""
        return np.dtype(self.config.dtype) if self._is_quantised(name) else self.stored[name].dtype

    def names(self) -> list[str]:
        """All tensors that `read` knows."""
        if self.scheme is None:
            return list(self.stored)
        ends = re.compile(r"_(packed|scale|shape)$")
        bases = {name: ends.sub("", name) for name in self.stored}
        return list(dict.fromkeys(base if self._is_quantised(base) else name for name, base in bases.items()))

    def _headers(self) -> dict[str, Stored]:
        single, index = self.path / WEIGHTS, self.path / INDEX
        expected: dict[str, str] = {}
        if single.exists() and index.exists():
            raise CheckpointError(f"{self.path} holds both {WEIGHTS} and {INDEX}; remove the one that is stale")
        if index.exists():
            try:
                expected = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
                if not all(isinstance(file, str) and os.path.basename(file) == file for file in expected.values()):
                    raise ValueError("a file name is no file name")
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index} has no readable weight_map ({error!r}); fetch it again") from None
        elif not single.exists():
            raise CheckpointError(f"{self.path} holds neither {WEIGHTS} nor {INDEX}; give the folder of a checkpoint")
        held: dict[str, Stored] = {}
        files = sorted(set(expected.values())) or [WEIGHTS]
        for file in files:
            if not (self.path / file).exists():
                raise CheckpointError(f"{self.path}: {INDEX} names {file}, which is not there; fetch that file")
        for file in files:
            for name, stored in self._header(file).items():
                if name in held:
                    raise CheckpointError(f"{self.path}: tensor {name} is in two files, {file} the second; remove one")
                if expected and expected.get(name) != file:
                    raise CheckpointError(
                        f"{self.path}: {INDEX} does not put tensor {name} into {file}, which holds it; fetch both, or"
                        " remove the tensor if it belongs to no parameter"
                    )
                held[name] = stored
            for name in [name for name, where in expected.items() if where == file and name not in held]:
                raise CheckpointError(
                    f"{self.path}: {INDEX} puts tensor {name} into {file}, which lacks it; fetch both"
                )
        return held

    def _header(self, file: str) -> dict[str, Stored]:
        path = self.path / file
        try:
            with safe_open(path, "numpy"):  # the library's checks: sizes, overlaps, gaps, the file's length
                pass
            text = read_header(path)
            header = json.loads(text[8:])
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} is truncated or damaged ({error}); fetch it again") from None
        header.pop("__metadata__", None)
        stored = {}
        for name, about in header.items():
            if about["dtype"] not in DTYPES:
                raise CheckpointError(
                    f"{path}: tensor {name} is stored as {about['dtype']}, which is none of {', '.join(DTYPES)};"
                    " convert it"
                )
            dtype, offset = DTYPES[about["dtype"]], len(text) + about["data_offsets"][0]
            stored[name] = Stored(name, file, offset, dtype, tuple(about["shape"]))
        return stored

    def _canonical(self) -> dict[str, Stored]:
        stored: dict[str, Stored] = {}
        for name, tensor in self.raw.items():
            for own, part in _unstack(name.removeprefix(PREFIX), tensor):
                if own in stored:
                    raise CheckpointError(
                        f"{self.path}: tensors {name} and {stored[own].name} both hold {own}; remove one of them"
                    )
                stored[own] = part
        return stored

    # -- quantised matrices -------------------------------------------------------------------------------------------

    def _is_quantised(self, name: str) -> bool:
        return self.scheme is not None and quantize.is_quantised(name)

    def _parts(self, name: str) -> dict[str, Stored]:
        """What a quantised matrix consists of on disk."""
        ends = ("_packed", "_scale", "_shape") if self.scheme.packed else ("", "_scale")
        for part in (name + end for end in ends):
            if part not in self.stored:
                raise CheckpointError(f"{self.path}: tensor {part} is missing; fetch the files again")
        return {name + end: self.stored[name + end] for end in ends}

    def _quantised_shape(self, name: str) -> tuple[int, ...]:
        parts = self._parts(name)
        rows, columns = next(iter(parts.values())).shape
        shape = (rows, columns * 8 if self.scheme.packed else columns)
        expected = quantize.shapes(name, shape, parts[f"{name}_scale"].dtype, self.scheme)
        for part, about in expected.items():
            if (found := (parts[part].shape, parts[part].dtype)) != about:
                raise CheckpointError(
                    f"{self.path}: tensor {part} is {found[1]}{list(found[0])} but the quantization_config asks for"
                    f" {about[1]}{list(about[0])}; take the config.json that belongs to the weights"
                )
        return shape

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> np.ndarray:
        """A tensor, or the given rows and columns of a matrix. Safe to call from many threads."""
        if self._is_quantised(name):
            parts = {part: self._read(stored) for part, stored in self._parts(name).items()}
            value = quantize.dequantise(parts, self.scheme, np.dtype(self.config.dtype))[rows, columns]
        else:
            stored = self.stored[name]
            if stored.dtype not in _FLOATS:
                raise CheckpointError(
                    f"{self.path}: tensor {name} is stored as {stored.dtype}, but a parameter is float32, bfloat16 or"
                    " float16 unless config.json says how it was quantised; take the config.json that belongs to it"
                )
            value = self._read(stored, rows, columns)
        if self._check_finite and not _finite(value):
            raise CheckpointError(f"{self.path}: tensor {name} holds NaN or infinity; fetch it again")
        return value

    def read_raw(self, name: str) -> np.ndarray:
        """A tensor of `raw` as it lies on disk."""
        return self._read(self.raw[name])

    def _read(self, stored: Stored, rows: slice = slice(None), columns: slice = slice(None)) -> np.ndarray:
        if len(stored.shape) != 2:
            value = self._bytes(stored, stored.offset, stored.shape)
            self._verify(stored, value)
            return value[rows]
        height, width = stored.shape
        top, bottom, _ = rows.indices(height)
        left, right, _ = columns.indices(width)
        item = stored.dtype.itemsize
        if (right - left) * item >= _PAGE and right - left < width:
            value = np.empty((bottom - top, right - left), stored.dtype)
            for row in range(top, bottom):
                self._bytes(stored, stored.offset + (row * width + left) * item, (right - left,), value[row - top])
            return value
        # The disk hands out whole pages: rows narrower than one are read whole.
        value = self._bytes(stored, stored.offset + top * width * item, (bottom - top, width))
        if bottom - top == height:
            self._verify(stored, value)
        return value[:, left:right]

    def _bytes(self, stored: Stored, offset: int, shape: tuple[int, ...], out: np.ndarray | None = None) -> np.ndarray:
        value = np.empty(shape, stored.dtype) if out is None else out
        left = memoryview(value.reshape(-1).view(np.uint8))
        with self._lock:
            if stored.file not in self._files:
                self._files[stored.file] = os.open(self.path / stored.file, os.O_RDONLY)
            self.bytes_read += len(left)
        while len(left):
            count = os.preadv(self._files[stored.file], [left], offset)
            if count == 0:
                raise CheckpointError(f"{self.path / stored.file} ends within tensor {stored.name}; fetch it again")
            left, offset = left[count:], offset + count
        return value

    def _verify(self, stored: Stored, value: np.ndarray) -> None:
        if stored.whole and (wanted := self._checksums.get(stored.name)) and checksum(value) != wanted:
            raise CheckpointError(
                f"{self.path / stored.file}: tensor {stored.name} is damaged (its checksum is not that of {MANIFEST});"
                " fetch the file again"
            )


def checksum(value: np.ndarray) -> str:
    """XXH3 (64 bit) of a tensor's bytes, as hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def read_header(path: pathlib.Path) -> bytes:
    """The header of a safetensors file, its length included; less where the file ends before."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(min(int.from_bytes(length, "little"), 100_000_000))


def json_checksum(value) -> str:
    """XXH3 of a JSON value, whatever its layout."""
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())


def _finite(value: np.ndarray) -> bool:
    if value.dtype == DTYPES["BF16"]:  # the exponent's bits all set; ml_dtypes' own test is slow
        return not ((value.view(np.uint16) & 0x7F80) == 0x7F80).any()
    return bool(np.isfinite(value).all())


def _unstack(name: str, tensor: Stored) -> list[tuple[str, Stored]]:
    """The tensors of the table that one on disk holds."""
    for pattern, matrices in STACKED:
        if match := pattern.fullmatch(name):
            matrices = matrices or (match.group(2),)
            if len(tensor.shape) != 3 or tensor.shape[1] % len(matrices):
                return [(name, tensor)]  # refused later, by this name
            experts, rows, columns = tensor.shape[0], tensor.shape[1] // len(matrices), tensor.shape[2]
            size = rows * columns * tensor.dtype.itemsize
            return [
                (
                    f"{match.group(1)}.experts.{expert}.{matrix}_proj.weight",
                    tensor._replace(
                        offset=tensor.offset + (expert * len(matrices) + i) * size, shape=(rows, columns), whole=False
                    ),
                )
                for expert in range(experts)
                for i, matrix in enumerate(matrices)
            ]
    return [(name, tensor)]
