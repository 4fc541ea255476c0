"""The architecture as data: the released `config.json`, read and written in both of its spellings."""

import dataclasses
from collections.abc import Mapping
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
DENSE, SPARSE = "dense", "sparse"

# Keys that can only have one value here. Some files leave them out; none may contradict them.
_FIXED: dict[str, Any] = {
    "model_type": "cohere2_moe",
    "architectures": ["Cohere2MoeForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_shared_experts": 0,
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}
# Keys that say nothing about the arithmetic.
_INERT = {"output_router_logits", "shared_expert_combination_strategy", "transformers_version", "use_cache"}
# What an absent key means in the file format (transformers' Cohere2MoeConfig). These are not North's values.
_ABSENT: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": 128,
    "prefix_dense_intermediate_size": None,
    "prefix_dense_sliding_window_pattern": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "expert_selection_fn": "softmax",
    "norm_topk_prob": True,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "rms_norm_eps": None,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
    "bos_token_id": 5,
    "eos_token_id": 255001,
    "pad_token_id": 0,
    "dtype": "float32",
    "layer_types": None,
}
# Derived from, or folded into, other fields.
_SPELLINGS = {"first_k_dense_replace", "mlp_layer_types", "rope_parameters"}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of the decoder, named as in the released `config.json`; defaults are North Mini Code's.

    `first_k_dense_replace` counts the dense layers at the start. `layer_types` may be left out: the dense prefix then
    follows `prefix_dense_sliding_window_pattern` and the rest is full attention at every `sliding_window_pattern`-th
    layer. `rms_norm_eps=None` means LayerNorm with `layer_norm_eps`. `window_inclusive` is not part of the file: a
    query then sees the `sliding_window` tokens before it and itself (what the released model was trained with and
    vLLM and SGLang compute), instead of `sliding_window` tokens with itself (transformers).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of one expert
    prefix_dense_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    sliding_window: int
    first_k_dense_replace: int = 1
    prefix_dense_sliding_window_pattern: int = 1
    sliding_window_pattern: int = 4
    layer_types: tuple[str, ...] | None = None
    expert_selection_fn: str = "sigmoid"
    norm_topk_prob: bool = False
    rms_norm_eps: float | None = 1e-6
    layer_norm_eps: float = 1e-5
    rope_theta: float = 50000.0
    logit_scale: float = 1.0
    max_position_embeddings: int = 500_000
    initializer_range: float = 0.02
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 255001
    pad_token_id: int | None = 0
    dtype: str = "bfloat16"
    window_inclusive: bool = False

    def __post_init__(self):
        set_ = object.__setattr__  # the usual way around `frozen`, for derived values
        if self.layer_types is None:
            set_(self, "layer_types", self._derived_layer_types())
        set_(self, "layer_types", tuple(self.layer_types))
        if isinstance(self.eos_token_id, list):
            set_(self, "eos_token_id", tuple(self.eos_token_id))
        self._check()

    def _derived_layer_types(self) -> tuple[str, ...]:
        prefix, rest = self.first_k_dense_replace, self.num_hidden_layers - self.first_k_dense_replace
        patterns = [self.prefix_dense_sliding_window_pattern] * prefix + [self.sliding_window_pattern] * rest
        counts = [*range(1, prefix + 1), *range(1, rest + 1)]
        return tuple(FULL if c % p == 0 else SLIDING for c, p in zip(counts, patterns, strict=True))

    def _check(self):
        def need(ok: bool, what: str):
            if not ok:
                raise ValueError(f"model config: {what}")

        for key in (*_REQUIRED, "num_key_value_heads", "head_dim", "num_experts", "sliding_window"):
            need(isinstance(getattr(self, key), int) and getattr(self, key) > 0, f"{key} must be a positive integer")
        need(
            len(self.layer_types) == self.num_hidden_layers,
            f"layer_types lists {len(self.layer_types)} layers but num_hidden_layers is {self.num_hidden_layers};"
            " make them agree",
        )
        for kind in self.layer_types:
            need(kind in (FULL, SLIDING), f"layer_types holds {kind!r}; write {FULL!r} or {SLIDING!r}")
        need(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads"
            f" {self.num_key_value_heads}; every key/value head must serve equally many query heads",
        )
        need(self.head_dim % 2 == 0, f"head_dim {self.head_dim} is odd; rotary positions turn pairs, so make it even")
        need(
            1 <= self.num_experts_per_tok <= self.num_experts,
            f"num_experts_per_tok {self.num_experts_per_tok} must lie in 1 … num_experts = {self.num_experts}",
        )
        need(
            0 <= self.first_k_dense_replace <= self.num_hidden_layers,
            f"first_k_dense_replace {self.first_k_dense_replace} must lie in 0 … num_hidden_layers",
        )
        need(
            self.expert_selection_fn in ("sigmoid", "softmax"),
            f"expert_selection_fn {self.expert_selection_fn!r} is not known; write 'sigmoid' or 'softmax'",
        )

    def is_dense(self, layer: int) -> bool:
        """Whether the layer has one dense MLP of `prefix_dense_intermediate_size` instead of experts."""
        return layer < self.first_k_dense_replace

    def is_sliding(self, layer: int) -> bool:
        """Whether a query of the layer sees only the last `window` tokens."""
        return self.layer_types[layer] == SLIDING

    def uses_rope(self, layer: int) -> bool:
        """Whether queries and keys are rotated: sliding layers, and the dense prefix when its pattern is 1."""
        return self.is_sliding(layer) or (self.is_dense(layer) and self.prefix_dense_sliding_window_pattern == 1)

    def kind(self, layer: int) -> tuple[bool, bool]:
        """Whether the layer's attention is sliding, and whether it is rotary: all that its parameters do not say."""
        return self.is_sliding(layer), self.uses_rope(layer)

    @property
    def window(self) -> int:
        """Tokens visible to a query of a sliding layer, itself included."""
        return self.sliding_window + int(self.window_inclusive)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Reads a `config.json`: transformers' spelling, the released one, or both at once.

        Raises ValueError naming the key when it is unknown, asks for something this decoder does not compute, or
        contradicts another key.
        """
        raw = dict(raw)
        if "torch_dtype" in raw:
            raw["dtype"] = _agree(raw, "dtype", raw.pop("torch_dtype"), "torch_dtype")
        for key in sorted(raw):
            if key in _FIXED:
                if raw[key] != _FIXED[key]:
                    raise ValueError(
                        f"config.json: {key} is {raw[key]!r} but this decoder computes only {_FIXED[key]!r};"
                        " convert the checkpoint or extend north_jax/model"
                    )
            elif key not in {*_REQUIRED, *_ABSENT, *_INERT, *_SPELLINGS}:
                raise ValueError(
                    f"config.json: key {key!r} is not known, so its effect on the model is not either;"
                    " remove it if it is inert, or teach it to north_jax/model/config.py"
                )
        for key in _REQUIRED:
            if key not in raw:
                raise ValueError(f"config.json: key {key!r} is missing; take the file that belongs to the weights")

        values = {key: raw.get(key, default) for key, default in _ABSENT.items()}
        values |= {key: raw[key] for key in _REQUIRED}
        if (rope := raw.get("rope_parameters")) is not None:
            values["rope_theta"] = _rope_theta(raw, rope)
        values["rope_theta"] = float(values["rope_theta"])
        if values["num_key_value_heads"] is None:
            values["num_key_value_heads"] = raw["num_attention_heads"]
        if values["prefix_dense_intermediate_size"] is None:
            values["prefix_dense_intermediate_size"] = raw["intermediate_size"]
        values["first_k_dense_replace"] = _dense_prefix(raw)
        return cls(**values)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` with both spellings of what the engines read differently (SGLang reads
        `first_k_dense_replace`, transformers and vLLM `mlp_layer_types`; `rope_theta` and `rope_parameters` alike).
        """
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "window_inclusive"}
        own["layer_types"] = list(self.layer_types)
        own["mlp_layer_types"] = [DENSE if self.is_dense(i) else SPARSE for i in range(self.num_hidden_layers)]
        own["rope_parameters"] = {"rope_theta": self.rope_theta, "rope_type": "default"}
        if isinstance(self.eos_token_id, tuple):
            own["eos_token_id"] = list(self.eos_token_id)
        own |= {"shared_expert_combination_strategy": "average", "output_router_logits": False, "use_cache": True}
        return dict(sorted((_FIXED | own).items()))


def _agree(raw: Mapping[str, Any], key: str, value: Any, other: str) -> Any:
    if raw.get(key, value) != value:
        raise ValueError(f"config.json: {key} is {raw[key]!r} but {other} says {value!r}; correct one of them")
    return value


def _rope_theta(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    for key in rope:
        if key not in ("rope_theta", "rope_type") or (key == "rope_type" and rope[key] != "default"):
            raise ValueError(
                f"config.json: rope_parameters holds {key} = {rope[key]!r} but this decoder computes only unscaled"
                " rotary positions (rope_type 'default'); convert the checkpoint or extend pallas_kernels/rotary"
            )
    if "rope_theta" not in rope:
        return raw.get("rope_theta", _ABSENT["rope_theta"])
    return _agree(raw, "rope_theta", rope["rope_theta"], "rope_parameters")


def _dense_prefix(raw: Mapping[str, Any]) -> int:
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        return raw.get("first_k_dense_replace", 0)
    kinds = list(kinds)
    prefix = kinds.count(DENSE)
    expected = [DENSE] * prefix + [SPARSE] * (raw["num_hidden_layers"] - prefix)
    if kinds != expected:
        raise ValueError(
            "config.json: mlp_layer_types must be 'dense' layers followed by 'sparse' ones, num_hidden_layers ="
            f" {raw['num_hidden_layers']} in all, but is {kinds!r}; other orders are not supported"
        )
    return _agree(raw, "first_k_dense_replace", prefix, "mlp_layer_types (counting its dense layers)")
