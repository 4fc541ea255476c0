"""Hugging Face folder <-> Decoder, one parameter at a time: neither way holds more than that beside the model."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from tqdm import tqdm

from north_jax.model import Decoder, ModelConfig
from north_jax.parallel import parameter_shardings, processes
from north_jax.weights.export import SHARD_BYTES, FolderWriter, Planned, Unit
from north_jax.weights.folder import CheckpointError, Folder, checksum, is_orbax
from north_jax.weights.names import Entry, by_parameter, manifest, parameters

THREADS = 4  # that read and transpose experts; both let go of the interpreter
_BLOCK = 128  # rows and columns that are transposed at once
Slices = tuple[slice, ...]


# -- between the two layouts ------------------------------------------------------------------------------------------


def to_matrix(value: np.ndarray, entry: Entry) -> np.ndarray:
    """A parameter, or one expert of it, as it lies on disk."""
    if not entry.inputs:
        return value
    matrix = np.empty(entry.shape, value.dtype)
    _transpose(matrix, value.reshape(entry.shape[::-1]))
    return matrix


def _transpose(out: np.ndarray, value: np.ndarray) -> None:
    # A block at a time, so that both sides stay in the cache: all at once it takes six times as long.
    for i in range(0, len(value), _BLOCK):
        for j in range(0, len(out), _BLOCK):
            out[j : j + _BLOCK, i : i + _BLOCK] = value[i : i + _BLOCK, j : j + _BLOCK].T


def _matrix_slices(index: Slices, shape: tuple[int, ...], inputs: int) -> tuple[slice, slice] | None:
    """(rows, columns) of the disk matrix that hold the block `index` of a parameter (or expert) of this shape.

    None when they are no contiguous ranges: another axis than the first of a side is split.
    """

    def side(index: Slices, shape: tuple[int, ...]) -> slice | None:
        inner = math.prod(shape[1:])
        if any((part.start, part.stop) != (0, size) for part, size in zip(index[1:], shape[1:], strict=True)):
            return None
        return slice(index[0].start * inner, index[0].stop * inner)

    rows, columns = side(index[inputs:], shape[inputs:]), side(index[:inputs], shape[:inputs])
    return None if rows is None or columns is None else (rows, columns)


# -- reading ----------------------------------------------------------------------------------------------------------


def load(
    path: str | os.PathLike,
    dtype=None,
    *,
    mesh: Mesh | None = None,
    window_inclusive: bool = False,
    check_finite: bool = False,
    **how: str,
) -> Decoder:
    """The Decoder of a Hugging Face folder (`config.json` with `model.safetensors` or shards and their index), or of an
    Orbax folder that `tools/convert.py` made of one.

    With a mesh every parameter is laid out on it by the table of `north_jax/parallel`, and each process reads only what
    its devices hold. Parameters keep the type they have on disk unless `dtype` is given; quantised matrices come
    dequantised. `window_inclusive` as in ModelConfig; `how` are attention, moe and exchange of Decoder. check_finite:
    refuse NaN and infinity (in a Hugging Face folder).

    Host memory beside the arrays: one parameter. Raises CheckpointError, one sentence, on anything missing, left over,
    misshaped, truncated or damaged.
    """
    if is_orbax(path):
        from north_jax.weights import orbax_folder  # Orbax takes a second to import

        return orbax_folder.load(path, dtype, mesh=mesh, window_inclusive=window_inclusive, **how)
    with Folder(path, check_finite=check_finite) as folder:
        config = dataclasses.replace(folder.config, window_inclusive=window_inclusive)
        model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **how))
        entries = manifest(model)
        check(entries, {name: folder.shape(name) for name in folder.names()}, str(path))
        fill(model, entries, folder.read, folder.dtype, dtype=dtype, mesh=mesh, label=f"loading {folder.path.name}")
    return model


def check(entries: Mapping[str, Entry], shapes: Mapping[str, tuple], source: str) -> None:
    """Raises CheckpointError unless the named shapes are exactly those of the entries."""
    if missing := [name for name in entries if name not in shapes]:
        raise CheckpointError(
            f"{source}: tensor {missing[0]} is missing ({len(missing)} in all); fetch the files again, or take the"
            " config.json that belongs to them"
        )
    if extra := [name for name in shapes if name not in entries]:
        raise CheckpointError(
            f"{source}: tensor {extra[0]} belongs to no parameter of this config ({len(extra)} in all); take the"
            " config.json that belongs to the weights, or remove the tensor"
        )
    for name, entry in entries.items():
        if shapes[name] != entry.shape:
            raise CheckpointError(
                f"{source}: tensor {name} has shape {list(shapes[name])} but the config asks for {list(entry.shape)};"
                " take the config.json that belongs to the weights"
            )


Read = Callable[[str, slice, slice], np.ndarray]


def fill(
    model: Decoder,
    entries: Mapping[str, Entry],
    read: Read,
    stored_dtype: Callable[[str], np.dtype],
    *,
    dtype=None,
    mesh: Mesh | None = None,
    label: str = "loading",
) -> None:
    """Gives every parameter of the model, which may be abstract, the values that `read(name, rows, columns)` has."""
    names = by_parameter(entries)
    placed = shardings(model, mesh)
    params = parameters(model)
    with (
        ThreadPoolExecutor(THREADS, "read") as threads,
        tqdm(total=sum(p.size for _, p in params), desc=label, unit=" values", unit_scale=True, delay=3.0) as bar,
    ):
        for path, param in params:
            types = {np.dtype(stored_dtype(name)) for name in names[path]}
            if dtype is None and len(types) > 1:
                raise CheckpointError(
                    f"tensor {names[path][0]} and its sisters are one parameter, but are stored in several types"
                    f" ({', '.join(sorted(map(str, types)))}); convert them to one, or load with a dtype"
                )
            block_dtype = np.dtype(dtype) if dtype is not None else types.pop()
            sharding = placed[path]
            blocks = _blocks(tuple(param.shape), block_dtype, sharding)
            list(threads.map(functools.partial(_read_into, blocks, entries, read, tuple(param.shape)), names[path]))
            param.set_value(_assemble(tuple(param.shape), sharding, blocks))
            bar.update(param.size)


def shardings(model: Decoder, mesh: Mesh | None) -> dict[tuple, Sharding]:
    """Parameter path -> its sharding on the mesh, or on the default device."""
    if mesh is None:
        one_device = SingleDeviceSharding(jax.config.jax_default_device or jax.local_devices()[0])
        return dict.fromkeys((path for path, _ in parameters(model)), one_device)
    placed = parameter_shardings(mesh, nnx.state(model, nnx.Param))
    return {path: param.get_value() for path, param in nnx.to_flat_state(placed)}


def read_parameter(
    out: np.ndarray, names: Sequence[str], entries: Mapping[str, Entry], read: Read, threads: ThreadPoolExecutor
) -> None:
    """Reads a whole parameter into `out`, which has its shape, from its disk tensors `names`."""
    blocks = {tuple((0, size) for size in out.shape): out}
    list(threads.map(functools.partial(_read_into, blocks, entries, read, out.shape), names))


Bounds = tuple[tuple[int, int], ...]  # (start, stop) along every axis


def _bounds(index: Slices, shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _blocks(shape: tuple, dtype: np.dtype, sharding: Sharding) -> dict[Bounds, np.ndarray]:
    """An empty host array for every different part of the parameter that a device of this process holds."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    different = sorted({_bounds(index, shape) for index in indices})
    return {bounds: np.empty([stop - start for start, stop in bounds], dtype) for bounds in different}


def _read_into(blocks: dict[Bounds, np.ndarray], entries: Mapping[str, Entry], read: Read, shape: tuple, name: str):
    """Reads what the blocks need of one disk tensor, once, and writes it into all of them."""
    entry = entries[name]
    # The blocks, or the expert's part of them, and which part of the parameter (or expert) each is.
    wanted: list[tuple[np.ndarray, Slices]] = []
    for bounds, block in blocks.items():
        index = tuple(slice(*pair) for pair in bounds)
        if entry.expert is None:
            wanted.append((block, index))
        elif index[0].start <= entry.expert < index[0].stop:
            wanted.append((block[entry.expert - index[0].start], index[1:]))
    if not wanted:
        return
    own_shape = shape if entry.expert is None else shape[1:]
    if not entry.inputs:
        top, bottom = min(i[0].start for _, i in wanted), max(i[0].stop for _, i in wanted)
        value = read(name, slice(top, bottom), slice(None))
        for block, index in wanted:
            block[...] = value[(slice(index[0].start - top, index[0].stop - top), *index[1:])]
        return
    parts = [_matrix_slices(index, own_shape, entry.inputs) for _, index in wanted]
    if None in parts:  # split where the disk's matrix has no axis: take it whole
        whole = np.ascontiguousarray(read(name, slice(None), slice(None)).T).reshape(own_shape)
        for block, index in wanted:
            block[...] = whole[index]
        return
    rows = slice(min(r.start for r, _ in parts), max(r.stop for r, _ in parts))
    columns = slice(min(c.start for _, c in parts), max(c.stop for _, c in parts))
    value = read(name, rows, columns)
    for (block, _), (r, c) in zip(wanted, parts, strict=True):
        matrix = value[r.start - rows.start : r.stop - rows.start, c.start - columns.start : c.stop - columns.start]
        _transpose(block.reshape(matrix.shape[::-1]), matrix)


def _assemble(shape: tuple, sharding: Sharding, blocks: dict[Bounds, np.ndarray]) -> jax.Array:
    placed = [
        jax.device_put(blocks[_bounds(index, shape)], device)
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def from_tensors(model: Decoder, tensors: Mapping[str, np.ndarray], dtype=None) -> None:
    """Replaces all parameters of the model (which may be abstract) by the named disk tensors, as `dtype` if given.

    Raises CheckpointError naming the tensor that is missing, left over or misshaped; the model is then unchanged.
    """
    entries = manifest(model)
    check(entries, {name: tuple(value.shape) for name, value in tensors.items()}, "tensors")

    def read(name: str, rows: slice, columns: slice) -> np.ndarray:
        value = np.asarray(tensors[name])
        return value[rows, columns] if value.ndim == 2 else value[rows]

    fill(model, entries, read, lambda name: np.asarray(tensors[name]).dtype, dtype=dtype)


def read_tensors(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """All tensors of a folder by name, exactly as they lie on disk."""
    with Folder(path) as folder:
        return {name: folder.read_raw(name) for name in folder.raw}


# -- writing ----------------------------------------------------------------------------------------------------------


class _Parameters:
    """The disk tensors of a model, made as they are asked for; holds the host copy of the last parameter only."""

    def __init__(self, model: Decoder):
        self.entries = manifest(model)
        self._params = dict(parameters(model))
        self._held: tuple[tuple, np.ndarray] | None = None

    def plan(self) -> list[Unit]:
        return [(Planned(name, entry.shape, self.dtype(name)),) for name, entry in self.entries.items()]

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(self._params[self.entries[name].path].dtype)

    def __call__(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        if self._held is None or self._held[0] != entry.path:
            self._held = None  # before the next one is fetched
            self._held = (entry.path, processes.on_host(self._params[entry.path][...]))
        value = self._held[1]
        return to_matrix(value if entry.expert is None else value[entry.expert], entry)


def to_tensors(model: Decoder) -> dict[str, np.ndarray]:
    """The parameters as they lie on disk: name -> array in the model's own type."""
    source = _Parameters(model)
    return {name: np.array(source(name)) for name in source.entries}


def checksums(model: Decoder) -> dict[str, str]:
    """Disk tensor -> checksum of it in the model's own type, as `save` would write it into the manifest."""
    source = _Parameters(model)
    return {name: checksum(source(name)) for name in source.entries}


def save(
    path: str | os.PathLike,
    model: Decoder,
    *,
    version: str | int,
    step: int,
    tokenizer_dir: str | os.PathLike | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a complete Hugging Face folder: weights by expert, configs in both spellings, the files of
    `tokenizer_dir` (a tokenizer's or a checkpoint's folder) byte for byte, and `north_manifest.json` with the weight
    version, the step and a checksum of every tensor and file.

    Everything is written beside `path` and renamed into place, so nobody sees half a folder; a folder already at
    `path` is replaced. Host memory beside the model: one parameter. In a run of several processes all of them call
    this and the first one writes. Raises OSError, one sentence, when the disk is full; what was at `path` is then
    untouched.
    """
    source = _Parameters(model)
    if not processes.first():
        for name in source.entries:  # takes part in the gathering
            source(name)
        processes.meet()
        return
    with FolderWriter(path, replace=True) as writer:
        plan = source.plan()
        write_configs(writer, model.config, source.dtype("model.embed_tokens.weight"), tokenizer_dir)
        written = writer.weights(plan, lambda unit: [source(unit[0].name)], max_shard_bytes=max_shard_bytes)
        writer.manifest(version=version, step=step, checksums=written)
    processes.meet()  # no process goes on before the folder is there


def write_configs(
    writer: FolderWriter,
    config: ModelConfig,
    dtype: np.dtype,
    carry: str | os.PathLike | None,
    quantization: dict | None = None,
) -> None:
    """config.json, what is carried along from another folder, and generation_config.json unless it was."""
    if carry is not None:
        writer.carry(carry)
    raw = dataclasses.replace(config, dtype=str(dtype)).to_hf()
    if quantization is not None:
        raw["quantization_config"] = quantization
    writer.json("config.json", raw)
    if not (writer.partial / "generation_config.json").exists():
        special = {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        writer.json("generation_config.json", {"_from_model_config": True, **special})
