"""Which tensors a checkpoint folder must hold, checked from the headers before any is copied."""

import json
import pathlib
import re
from collections.abc import Iterable

from north_sglang.config import NorthConfig
from safetensors import SafetensorError, safe_open

# What quantised matrices have beside, or instead of, their weight.
QUANTISED = re.compile(r"\.weight_(packed|scale|shape|scale_inv|zero_point|g_idx)$")
NAMED = 3
# Keys of config.json without effect on what is computed; the rest must stay as they were when the server started.
INERT = {"_name_or_path", "dtype", "initializer_range", "torch_dtype", "transformers_version", "use_cache"}


class CheckpointError(ValueError):
    """The tensors are not those of the served model."""


def expected(config: NorthConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its name on disk, with its shape."""
    size = config.on_disk
    hidden, vocab, experts = size["hidden_size"], size["vocab_size"], size["num_experts"]
    queries, keys = (size[key] * size["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))

    def mlp(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}.gate_proj.weight": (width, hidden),
            f"{prefix}.up_proj.weight": (width, hidden),
            f"{prefix}.down_proj.weight": (hidden, width),
        }

    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.self_attn.q_proj.weight"] = (queries, hidden)
        shapes[f"{layer}.self_attn.k_proj.weight"] = (keys, hidden)
        shapes[f"{layer}.self_attn.v_proj.weight"] = (keys, hidden)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, queries)
        if i < config.first_k_dense_replace:
            shapes |= mlp(f"{layer}.mlp", size["prefix_dense_intermediate_size"])
            continue
        shapes[f"{layer}.mlp.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            shapes |= mlp(f"{layer}.mlp.experts.{expert}", size["intermediate_size"])
    return shapes


def check(found: dict[str, tuple[int, ...]], config: NorthConfig, where: str, *, complete: bool) -> None:
    """Refuse unknown and wrongly shaped tensors, and with `complete` missing ones, by name.

    Of quantised matrices only the names are compared, since their packing decides the shapes.
    """
    wanted = expected(config)
    as_weight = {name: QUANTISED.sub(".weight", name) for name in found}
    if not getattr(config, "quantization_config", None):
        as_weight = {name: name for name in found}
    wrong = [f"{name} is unknown" for name, weight in as_weight.items() if weight not in wanted]
    wrong += [
        f"{name} has shape {list(found[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    if complete:
        wrong += [f"{name} is missing" for name in wanted.keys() - set(as_weight.values())]
    if wrong:
        more = f" and {len(wrong) - NAMED} more" if len(wrong) > NAMED else ""
        raise CheckpointError(
            f"{where}: tensor {', tensor '.join(sorted(wrong)[:NAMED])}{more}; nothing was loaded, export it again"
        )


def check_folder(folder: str, files: Iterable[str], config: NorthConfig) -> None:
    """Refuse a folder whose safetensors headers or config.json are not those of the served model."""
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  not a mapping
                    if name in found:
                        raise CheckpointError(f"{folder}: tensor {name} is there twice; nothing was loaded")
                    found[name] = tuple(tensors.get_slice(name).get_shape())
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged ({error}); nothing was loaded, export it again") from None
    check(found, config, folder, complete=True)

    file = pathlib.Path(folder) / "config.json"
    if not file.is_file():
        return
    present = {k: v for k, v in NorthConfig(**json.loads(file.read_text())).to_dict().items() if k not in INERT}
    # Kept beside the config, because SGLang may have changed that one since (--json-model-override-args).
    served = vars(config).setdefault("file_at_start", present)
    for key in sorted(served.keys() | present.keys()):
        if served.get(key) != present.get(key):
            raise CheckpointError(
                f"{folder}: config.json says {key} = {present.get(key)!r} but the server was started with"
                f" {served.get(key)!r}; nothing was loaded, start a server for this model"
            )
