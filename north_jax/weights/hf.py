"""Hugging Face folder <-> Decoder: one table of names, a reader that refuses what does not fit, an atomic writer.

A matrix on disk is [out, in] and flat; in memory it is [in…, out…] with heads split off and experts stacked. The
bytes of a tensor survive load and save unchanged.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from north_jax.model import Decoder, ModelConfig

# Name on disk, parameter path, and how many leading axes of the parameter are the matrix's input (0: kept as it is).
TABLE = (
    ("model.embed_tokens.weight", "embedding_VD", 0),
    ("model.norm.weight", "norm.scale_D", 0),
    ("model.layers.{layer}.input_layernorm.weight", "layers.{layer}.norm.scale_D", 0),
    ("model.layers.{layer}.self_attn.q_proj.weight", "layers.{layer}.attention.q_DHK", 1),
    ("model.layers.{layer}.self_attn.k_proj.weight", "layers.{layer}.attention.k_DGK", 1),
    ("model.layers.{layer}.self_attn.v_proj.weight", "layers.{layer}.attention.v_DGK", 1),
    ("model.layers.{layer}.self_attn.o_proj.weight", "layers.{layer}.attention.o_HKD", 2),
    ("model.layers.{layer}.mlp.gate_proj.weight", "layers.{layer}.mlp.gate_DF", 1),
    ("model.layers.{layer}.mlp.up_proj.weight", "layers.{layer}.mlp.up_DF", 1),
    ("model.layers.{layer}.mlp.down_proj.weight", "layers.{layer}.mlp.down_FD", 1),
    ("model.layers.{layer}.mlp.gate.weight", "layers.{layer}.mlp.router_DE", 1),
    ("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", "layers.{layer}.mlp.gate_EDF", 1),
    ("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", "layers.{layer}.mlp.up_EDF", 1),
    ("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", "layers.{layer}.mlp.down_EFD", 1),
)
_ROW = {path: (name, inputs) for name, path, inputs in TABLE}
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A folder that cannot be loaded: one sentence naming the file or tensor, and the remedy."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one disk tensor of shape `shape` goes: a parameter, or one expert of a stacked parameter."""

    path: tuple
    expert: int | None
    inputs: int
    shape: tuple[int, ...]


def manifest(model: Decoder) -> dict[str, Entry]:
    """Every tensor of the model's folder by its name on disk, in the order of the parameters.

    Works on an abstract model (`nnx.eval_shape`) as well.
    """
    entries: dict[str, Entry] = {}
    for path, param in _parameters(model):
        dotted = ".".join(map(str, path))
        layer = re.search(r"\d+", dotted)
        template, inputs = _ROW[re.sub(r"\d+", "{layer}", dotted)]
        shape = tuple(param.shape)
        experts: list[int | None] = [None]
        if "{expert}" in template:
            experts, shape = list(range(shape[0])), shape[1:]
        if inputs:
            shape = (int(np.prod(shape[inputs:])), int(np.prod(shape[:inputs])))
        for expert in experts:
            name = template.format(layer=layer and layer.group(), expert=expert)
            entries[name] = Entry(path, expert, inputs, shape)
    return entries


def _parameters(model: Decoder) -> list[tuple[tuple, nnx.Param]]:
    return list(nnx.to_flat_state(nnx.state(model, nnx.Param)))


def to_tensors(model: Decoder) -> dict[str, np.ndarray]:
    """The parameters as they lie on disk: name -> array in the model's own type."""
    host = {path: np.asarray(jax.device_get(param[...])) for path, param in _parameters(model)}
    tensors = {}
    for name, entry in manifest(model).items():
        value = host[entry.path] if entry.expert is None else host[entry.path][entry.expert]
        if entry.inputs:
            value = value.reshape(entry.shape[::-1]).T
        tensors[name] = np.ascontiguousarray(value)
    return tensors


def from_tensors(model: Decoder, tensors: Mapping[str, np.ndarray], dtype=None) -> None:
    """Replaces all parameters of the model (which may be abstract) by the named disk tensors, as `dtype` if given.

    Raises CheckpointError naming the tensor that is missing, left over or misshaped; the model is then unchanged.
    """
    _fill(model, {name: tuple(value.shape) for name, value in tensors.items()}, tensors.__getitem__, "tensors", dtype)


def _fill(model: Decoder, shapes: Mapping[str, tuple], read: Callable[[str], np.ndarray], source: str, dtype) -> None:
    entries = manifest(model)
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
    names: dict[tuple, list[str]] = {}
    for name, entry in entries.items():
        names.setdefault(entry.path, []).append(name)
    for path, param in _parameters(model):  # one parameter at a time: the folder may be larger than what is to spare
        matrices = [read(name).T if entries[name].inputs else read(name) for name in names[path]]
        stacked = entries[names[path][0]].expert is not None
        value = np.stack(matrices) if stacked else matrices[0]
        param.set_value(jnp.array(value.reshape(param.shape), dtype=dtype))


def read_config(path: str | os.PathLike) -> ModelConfig:
    """The folder's `config.json`. Raises CheckpointError when it is missing, unreadable or not understood."""
    file = pathlib.Path(path) / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError(f"holds {type(raw).__name__}, not an object")
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist; give the folder of a Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); fetch it again") from None
    try:
        return ModelConfig.from_hf(raw)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from None


@contextlib.contextmanager
def _open_shards(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Tensor name -> the open file that holds it, headers and file sizes checked."""
    single, index = path / _WEIGHTS, path / _INDEX
    expected: dict[str, str] = {}
    if single.exists() and index.exists():
        raise CheckpointError(f"{path} holds both {_WEIGHTS} and {_INDEX}; remove the one that is stale")
    if index.exists():
        try:
            expected = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index} has no readable weight_map ({error!r}); fetch it again") from None
    elif not single.exists():
        raise CheckpointError(f"{path} holds neither {_WEIGHTS} nor {_INDEX}; give the folder of a checkpoint")
    held: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for file in sorted(set(expected.values())) or [_WEIGHTS]:
            if not (path / file).exists():
                raise CheckpointError(f"{path}: {_INDEX} names {file}, which is not there; fetch that file")
            try:
                shard = stack.enter_context(safe_open(path / file, "numpy"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path / file} is truncated or damaged ({error}); fetch it again") from None
            for name in shard.keys():  # noqa: SIM118 - not a dict
                if name in held:
                    raise CheckpointError(f"{path}: tensor {name} is in two files, {file} the second; remove one")
                held[name] = shard
            for name in [name for name, where in expected.items() if where == file and name not in held]:
                raise CheckpointError(f"{path}: {_INDEX} puts tensor {name} into {file}, which lacks it; fetch both")
        yield held


def read_tensors(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """All tensors of a folder by name, exactly as they lie on disk."""
    with _open_shards(pathlib.Path(path)) as held:
        return {name: shard.get_tensor(name) for name, shard in held.items()}


def load(path: str | os.PathLike, dtype=None, *, moe: str = "dense", window_inclusive: bool = False) -> Decoder:
    """The Decoder of a Hugging Face folder: `config.json` with `model.safetensors` or shards and their index.

    Parameters keep the type they have on disk unless `dtype` is given; `moe` and `window_inclusive` as in Decoder and
    ModelConfig. Raises CheckpointError, one sentence, on anything missing, left over, misshaped or truncated.
    """
    path = pathlib.Path(path)
    config = dataclasses.replace(read_config(path), window_inclusive=window_inclusive)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), moe=moe))
    with _open_shards(path) as held:
        shapes = {name: tuple(shard.get_slice(name).get_shape()) for name, shard in held.items()}
        _fill(model, shapes, lambda name: held[name].get_tensor(name), str(path), dtype)
    return model


def save(
    path: str | os.PathLike,
    model: Decoder,
    *,
    version: str | int,
    step: int,
    tokenizer_dir: str | os.PathLike | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a complete Hugging Face folder: weights by expert, configs, the tokenizer's files, and
    `north_manifest.json` = {"weight_version", "step"}.

    Everything is written beside `path` and renamed into place, so nobody sees half a folder; a folder already at
    `path` is replaced. Raises OSError, one sentence, when the disk is full; what was at `path` is then untouched.
    """
    path = pathlib.Path(path).absolute()
    partial, replaced = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.replaced")
    path.parent.mkdir(parents=True, exist_ok=True)
    # What a writer that was killed left behind; between its two renames the old folder is still the good one.
    if replaced.exists() and not path.exists():
        replaced.rename(path)
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    try:
        _write_folder(partial, model, str(version), step, tokenizer_dir, max_shard_bytes)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"checkpoint {path} could not be written ({error}); free disk space and run again") from error
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_folder(folder: pathlib.Path, model: Decoder, version: str, step: int, tokenizer_dir, max_shard_bytes: int):
    def write_json(name: str, value: Any):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

    if tokenizer_dir is not None:
        for file in sorted(pathlib.Path(tokenizer_dir).iterdir()):
            # The tokenizer may come from a checkpoint folder: take what is its own.
            if file.is_file() and not file.name.startswith(("model", "config.json", "generation_config", "north_")):
                shutil.copyfile(file, folder / file.name)
    tensors = to_tensors(model)
    config = dataclasses.replace(model.config, dtype=str(tensors["model.embed_tokens.weight"].dtype)).to_hf()
    write_json("config.json", config)
    shards = _split(tensors, max_shard_bytes)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [_WEIGHTS]
    else:
        weight_map = {tensor: file for file, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(value.nbytes for value in tensors.values())
        write_json(_INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for file, shard in zip(names, shards, strict=True):
        save_file({name: tensors[name] for name in shard}, folder / file, metadata={"format": "pt"})
        (folder / file).chmod((folder / "config.json").stat().st_mode)  # the library's own mode is for its owner only
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json("generation_config.json", {"_from_model_config": True, **special})
    write_json("north_manifest.json", {"weight_version": version, "step": step})


def _split(tensors: Mapping[str, np.ndarray], max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name, value in tensors.items():
        if shards[-1] and held + value.nbytes > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += value.nbytes
    return shards
