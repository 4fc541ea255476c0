"""Checkpoints of a training run: Orbax in the background, one folder per step, the newest good one restored."""

import json
import logging
import os
import shutil
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from north_jax.parallel import processes
from north_jax.weights.folder import CheckpointError


class Checkpoints:
    """The last `keep` checkpoints of a run, `directory`/<step>/.

    A checkpoint holds a pytree of arrays (random keys among them) and a JSON dict (stage, data iterator, …) and appears
    under its number only when it is complete. Every array carries a checksum, so that damage is noticed and the one
    before is taken. Any number of devices, in any mesh and of any number of processes, can read what others wrote. With
    several processes all make the same calls, and see the same directory.
    """

    def __init__(self, directory: str | os.PathLike, *, keep: int = 2):
        self.directory = Path(directory).resolve()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._saving: int | None = None
        quiet_orbax()
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True),
            item_handlers={"state": ocp.StandardCheckpointHandler(), "extra": ocp.JsonCheckpointHandler()},
        )

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints in the directory, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, extra: dict) -> None:
        """Copies the state and begins to write it; returns before it is on disk (see `wait`).

        Raises CheckpointError when this or the previous checkpoint finds no room; earlier ones are untouched.
        """
        self.wait()
        named = _named(state)
        arrays = {name: jax.random.key_data(array) if _is_key(array) else array for name, array in named.items()}
        needed = sum(array.nbytes for array in arrays.values())
        free = processes.from_first(shutil.disk_usage(self.directory).free)
        if needed > free:
            raise CheckpointError(self._no_room(step, f"needs {needed:,} bytes where {free:,} are free"))
        about = {
            "arrays": _types(named),
            "checksums": bit_sums(arrays),
            "extra": extra,
        }
        about["crc32"] = _crc32(about)
        items = ocp.args.Composite(state=ocp.args.StandardSave(arrays), extra=ocp.args.JsonSave(about))
        self._saving = step
        try:
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            self._failed(error)

    def wait(self) -> None:
        """Waits until the last save is on disk. Raises CheckpointError when it could not be written."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._failed(error)
        self._saving = None

    def close(self) -> None:
        """Waits for the last save and ends the background threads."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def restore_latest(self, template: Any) -> tuple[int, Any, dict] | None:
        """(step, state, extra) of the newest checkpoint that is whole, or None when there is none at all.

        `template` is a pytree of arrays or ShapeDtypeStructs with the wanted shapes, types and shardings. A damaged
        checkpoint is renamed to <step>.damaged and reported in one printed sentence. Raises CheckpointError when all
        are damaged (none is renamed then) or when one was written for other parameters than the template's.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps):
            try:
                state, extra = self._restore(step, template)
            except CheckpointError:
                raise
            except Exception as error:  # whatever the storage layers raise on a bad file
                damaged[step] = _gist(error)
                continue
            for bad, why in damaged.items() if processes.first() else ():
                (self.directory / str(bad)).rename(self.directory / f"{bad}.damaged")
                print(
                    f"checkpoint {bad} in {self.directory} is damaged ({why}): it is now {bad}.damaged and the run "
                    f"continues from checkpoint {step}",
                    file=sys.stderr,
                )
            if damaged:
                processes.meet()
                self._manager.reload()
            return step, state, extra
        if damaged:
            step, why = max(damaged.items())
            raise CheckpointError(
                f"all checkpoints in {self.directory} are damaged (the newest, {step}: {why}): restore the folder from "
                "a copy, or delete it to start over"
            )
        return None

    def _restore(self, step: int, template: Any) -> tuple[Any, dict]:
        saved = self._manager.restore(step, args=ocp.args.Composite(extra=ocp.args.JsonRestore()))["extra"]
        if saved.pop("crc32", None) != _crc32(saved):
            raise ValueError("the checksum of its description does not match")
        wanted = _named(template)
        here, there = _types(wanted), saved["arrays"]
        if differing := sorted(name for name in here | there if here.get(name) != there.get(name)):
            name = differing[0]
            raise CheckpointError(
                f"checkpoint {step} in {self.directory} was written by another configuration: {name} is "
                f"{there.get(name, 'absent')} there and {here.get(name, 'absent')} here "
                f"({len(differing)} arrays differ); use the config it was written with, or another workdir"
            )
        abstract = {}
        for name, array in wanted.items():
            data = jax.eval_shape(jax.random.key_data, array) if _is_key(array) else array
            abstract[name] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=array.sharding)
        arrays = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))["state"]
        for name, checksum in bit_sums(arrays).items():
            if checksum != saved["checksums"][name]:
                raise ValueError(f"the checksum of {name} does not match")
        for name in (name for name, array in wanted.items() if _is_key(array)):
            impl = jax.random.key_impl(jnp.zeros((), wanted[name].dtype))
            arrays[name] = jax.random.wrap_key_data(arrays[name], impl=impl)
        return jax.tree.unflatten(jax.tree.structure(template), [arrays[name] for name in wanted]), saved["extra"]

    def _failed(self, error: Exception) -> None:
        step, self._saving = self._saving, None
        if step is None or step in self.steps:
            raise error
        for leftover in self.directory.glob(f"{step}.orbax-checkpoint-tmp*"):
            shutil.rmtree(leftover, ignore_errors=True)
        raise CheckpointError(self._no_room(step, f"could not be written ({_gist(error)})")) from error

    def _no_room(self, step: int, why: str) -> str:
        good = f"checkpoint {self.steps[-1]} is untouched" if self.steps else "there is no earlier one"
        return f"checkpoint {step} in {self.directory} {why}: make room there and run the same command again ({good})"


def _gist(error: Exception) -> str:
    # The storage layers append their whole settings to what went wrong.
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = lines[0].split(". See full TensorStore details")[0]
    return text if len(text) <= 200 else f"{text[:60]} … {text[-135:]}"


def quiet_orbax() -> None:
    """Keeps Orbax's log from the terminal.

    It logs what it does, and every failure with its tracebacks before raising it: one sentence of ours is to be read.
    """
    logging.getLogger("absl").addFilter(_not_from_orbax)


def _not_from_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _named(tree: Any) -> dict[str, Any]:
    # One flat dict of plain names: what is on disk does not depend on the classes of any library.
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _is_key(array) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _types(arrays: dict[str, Any]) -> dict[str, list]:
    return {name: [list(array.shape), str(array.dtype)] for name, array in arrays.items()}


def _crc32(about: dict) -> int:
    # Of what is read back, in which keys are strings and tuples lists.
    return zlib.crc32(json.dumps(json.loads(json.dumps(about)), sort_keys=True).encode())


def bit_sums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """Sum of the bits of every array modulo 2^32: the same on every device layout, and cheap on the device."""
    return dict(zip(arrays, np.asarray(_bit_sums(list(arrays.values()))).tolist(), strict=True))


@jax.jit
def _bit_sums(arrays: list[jax.Array]) -> jax.Array:
    def one(array):
        bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
        return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)

    return jnp.stack([one(array) for array in arrays])
