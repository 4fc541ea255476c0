"""Parameters as an Orbax checkpoint: what `tools/convert.py` makes of a Hugging Face folder for quick sharded starts.

    FOLDER/config.json, …          configs, tokenizer files and manifest, as in a Hugging Face folder
    FOLDER/parameters/ITEM/        an Orbax PyTree checkpoint for every layer and every stack of experts, for the
                                   embedding and for the last norm

The arrays have the shapes the decoder uses them in, so nothing is transposed or stacked on the way in, and a device
reads only its own part. One item at a time is written, whole or not at all, and none again that is there already.
"""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

from north_jax.model import Decoder
from north_jax.weights import hf
from north_jax.weights.checkpoint import bit_sums, quiet_orbax
from north_jax.weights.folder import MANIFEST, PARAMETERS, CheckpointError, read_config, read_manifest
from north_jax.weights.names import parameters

_STACKS = ("_EDF", "_EFD")
IN_FLIGHT_GB = 1  # the least that Orbax can be told
_CHUNK_BYTES = 64_000_000  # what is copied at once while writing


class Item(NamedTuple):
    """Where a parameter is stored: `name` within `item`, in this type."""

    item: str
    name: str
    dtype: np.dtype


def items(model: Decoder) -> dict[str, dict[str, tuple[tuple, nnx.Param]]]:
    """Item -> {name within it: (path, parameter)}, of a model that may be abstract."""
    result: dict[str, dict[str, tuple[tuple, nnx.Param]]] = {}
    for path, param in parameters(model):
        parts = [str(part) for part in path]
        # A stack of experts is an item of its own, 0.4 GB at full width: an item is written at once.
        split = len(parts) if parts[-1].endswith(_STACKS) else 2 if parts[0] == "layers" else 1
        result.setdefault(".".join(parts[:split]), {})[".".join(parts[split:]) or "value"] = (path, param)
    return result


def stored(folder: str | os.PathLike, model: Decoder) -> dict[tuple, Item]:
    """Parameter path -> where it is stored. CheckpointError unless the folder holds exactly the model's parameters."""
    found = {}
    for item, params in items(model).items():
        path = (pathlib.Path(folder) / PARAMETERS / item).absolute()
        with _reading(path), _handler() as checkpointer:
            there = checkpointer.metadata(path).item_metadata.tree
        if odd := sorted(there.keys() ^ params.keys()):
            raise CheckpointError(f"{path} has or lacks {odd[0]}, unlike config.json; convert the folder again")
        for name, (where, param) in params.items():
            if tuple(there[name].shape) != tuple(param.shape):
                raise CheckpointError(
                    f"{path}: {name} has shape {list(there[name].shape)} but the config asks for"
                    f" {list(param.shape)}; take the config.json that belongs to it"
                )
            found[where] = Item(item, name, np.dtype(there[name].dtype))
    return found


def write_item(folder: pathlib.Path, item: str, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Writes one item under `folder`/parameters, in the place of what is there; returns the bit sum of every array."""
    path = (folder / PARAMETERS / item).absolute()
    save_args = {
        # A chunk an expert: Orbax splits a sharded axis into single entries.
        name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,) if item.endswith(_STACKS) else ())
        for name in arrays
    }
    with _handler() as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(dict(arrays), save_args=save_args), force=True)
    return {f"{item}.{name}": bit_sum(array) for name, array in arrays.items()}


def read_array(folder: str | os.PathLike, item: str, name: str, sums: Mapping[str, int]) -> np.ndarray:
    """One array of an item, on the host; `sums` are `read_sums`. CheckpointError when it is missing or damaged."""
    path = (pathlib.Path(folder) / PARAMETERS / item).absolute()
    with _reading(path), _handler() as checkpointer:
        args = ocp.args.PyTreeRestore(
            {name: 0}, restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)}, partial_restore=True
        )
        array = checkpointer.restore(path, args=args)[name]
    _verify(path, f"{item}.{name}", bit_sum(array), sums)
    return array


def load(
    path: str | os.PathLike,
    dtype=None,
    *,
    mesh: Mesh | None = None,
    window_inclusive: bool = False,
    **how: str,
) -> Decoder:
    """The Decoder of such a folder, on the mesh if there is one; see `hf.load`."""
    path = pathlib.Path(path)
    config = dataclasses.replace(read_config(path), window_inclusive=window_inclusive)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **how))
    stored(path, model)  # refuses what does not fit, before anything is read
    shardings = hf.shardings(model, mesh)
    sums = read_sums(path)
    for item, params in items(model).items():
        folder = (path / PARAMETERS / item).absolute()
        restore = {
            name: ocp.ArrayRestoreArgs(sharding=shardings[where], global_shape=tuple(param.shape))
            for name, (where, param) in params.items()
        }
        with _reading(folder), _handler() as checkpointer:
            arrays = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=restore))
        found = bit_sums(arrays)
        for name, (_, param) in params.items():
            _verify(folder, f"{item}.{name}", found[name], sums)
            param.set_value(arrays[name] if dtype is None else arrays[name].astype(dtype))
    return model


def bit_sum(array: np.ndarray) -> int:
    """`checkpoint.bit_sums` of an array on the host."""
    bits = np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")
    return int(bits.sum(dtype=np.uint32))


def read_sums(folder: str | os.PathLike) -> dict[str, int]:
    """The bit sums of all parameters, by "item.name", from the manifest. CheckpointError when they are not there."""
    about = read_manifest(pathlib.Path(folder))
    if "bit_sums" not in about:
        raise CheckpointError(f"{folder} has no {MANIFEST} with the sums of its parameters; convert the folder again")
    return about["bit_sums"]


def _verify(path: pathlib.Path, name: str, found: int, sums: Mapping[str, int]) -> None:
    if sums.get(name) != found:
        raise CheckpointError(f"{path}: {name} is damaged (its checksum is not that of {MANIFEST}); convert it again")


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    if not path.exists():
        raise CheckpointError(f"{path} is not there; convert the folder again")
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # whatever the storage layers raise on a bad file
        raise CheckpointError(f"{path} is damaged ({str(error)[:200]!r}); convert the folder again") from error


@contextlib.contextmanager
def _handler() -> Iterator[ocp.Checkpointer]:
    # Random bits do not compress; without it writing runs at the disk's speed. Nothing changes the arrays while they
    # are written, so Orbax need not copy them first.
    handlers = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_compression=False,
        save_concurrent_gb=IN_FLIGHT_GB,
        restore_concurrent_gb=IN_FLIGHT_GB,
        type_handler_registry=handlers,
    )
    quiet_orbax()
    with ocp.Checkpointer(handler) as checkpointer:
        yield checkpointer
