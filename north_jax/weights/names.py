"""The one table between names on disk and parameter paths, and what follows from it for a given model.

A matrix on disk is [out, in] and flat; in memory it is [in…, out…] with heads split off and experts stacked.
"""

import dataclasses
import re

import numpy as np
from flax import nnx

from north_jax.model import Decoder

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

# Other spellings met in the wild, as (pattern, experts stacked in one tensor: which of the table's matrices, in order
# along the rows). Prefix "language_model." and `switch_mlp`: mlx-community; `gate_up_proj`: transformers in memory.
PREFIX = "language_model."
STACKED = (
    (re.compile(r"(model\.layers\.\d+\.mlp)\.switch_mlp\.(gate|up|down)_proj\.weight"), None),
    (re.compile(r"(model\.layers\.\d+\.mlp)\.experts\.gate_up_proj"), ("gate", "up")),
    (re.compile(r"(model\.layers\.\d+\.mlp)\.experts\.down_proj"), ("down",)),
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one disk tensor of shape `shape` goes: a parameter, or one expert of a stacked parameter."""

    path: tuple
    expert: int | None
    inputs: int
    shape: tuple[int, ...]


def parameters(model: Decoder) -> list[tuple[tuple, nnx.Param]]:
    """(path, parameter) of the model, which may be abstract, in a fixed order."""
    return list(nnx.to_flat_state(nnx.state(model, nnx.Param)))


def manifest(model: Decoder) -> dict[str, Entry]:
    """Every tensor of the model's folder by its name on disk, in the order of the parameters.

    Works on an abstract model (`nnx.eval_shape`) as well.
    """
    entries: dict[str, Entry] = {}
    for path, param in parameters(model):
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


def by_parameter(entries: dict[str, Entry]) -> dict[tuple, list[str]]:
    """Parameter path -> the names of its disk tensors, experts in order."""
    names: dict[tuple, list[str]] = {}
    for name, entry in entries.items():
        names.setdefault(entry.path, []).append(name)
    return names
