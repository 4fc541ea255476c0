"""North's `config.json` as SGLang sees it, in either spelling."""

from sglang.srt.configs.cohere2_moe import Cohere2MoeConfig
from transformers import AutoConfig

# Keys that can only have one value; none may contradict them.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "num_shared_experts": 0,
    "position_embedding_type": "rope_gptj",
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}
# Sizes that decide the shapes of the tensors in the folder.
ON_DISK = (
    "vocab_size",
    "hidden_size",
    "head_dim",
    "intermediate_size",
    "prefix_dense_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
)


class NorthConfig(Cohere2MoeConfig):
    """SGLang's config class, which reads only `first_k_dense_replace` and knows nothing of hybrid memory.

    `window_inclusive` (by --json-model-override-args) lets a query of a sliding layer see `sliding_window` keys before
    its own instead of `sliding_window` with its own, as in the trainer's ModelConfig. Errors: ValueError naming the key
    that asks for something the model does not compute, or contradicts another one.
    """

    def __init__(
        self,
        num_hidden_layers: int = 40,
        intermediate_size: int = 22528,
        first_k_dense_replace: int | None = None,
        mlp_layer_types: list[str] | None = None,
        prefix_dense_intermediate_size: int | None = None,
        rope_theta: float | None = None,
        rope_parameters: dict | None = None,
        window_inclusive: bool = False,
        **rest,
    ):
        for key, value in FIXED.items():
            if rest.get(key, value) != value:
                raise ValueError(f"config.json: {key} is {rest[key]!r} but North's model computes only {value!r}")
        rope = dict(rope_parameters or {})
        if rope.get("rope_type", "default") != "default" or rope.keys() - {"rope_theta", "rope_type"}:
            raise ValueError(f"config.json: rope_parameters {rope!r} ask for more than unscaled rotary positions")
        theta = _agreed("rope_theta", rope_theta, rope.get("rope_theta"), "rope_parameters", 10000.0)
        dense = None
        if mlp_layer_types is not None:
            dense = list(mlp_layer_types).count("dense")
            if list(mlp_layer_types) != ["dense"] * dense + ["sparse"] * (num_hidden_layers - dense):
                raise ValueError(
                    "config.json: mlp_layer_types must be 'dense' layers followed by 'sparse' ones,"
                    f" {num_hidden_layers} in all, but is {list(mlp_layer_types)!r}"
                )
        super().__init__(
            num_hidden_layers=num_hidden_layers,
            intermediate_size=intermediate_size,
            first_k_dense_replace=_agreed("first_k_dense_replace", first_k_dense_replace, dense, "mlp_layer_types", 0),
            prefix_dense_intermediate_size=prefix_dense_intermediate_size or intermediate_size,
            rope_theta=float(theta),
            rope_parameters={"rope_theta": float(theta), "rope_type": "default"},
            **rest,
        )
        self.window_inclusive = window_inclusive
        # SGLang widens these of its copy on a CPU or under tensor parallelism; the files have what they have.
        self.on_disk = {key: getattr(self, key) for key in ON_DISK}
        sliding = [kind == "sliding_attention" for kind in self.layer_types]
        # By these two SGLang gives sliding layers a pool of their own, which keeps the window only.
        self.is_hybrid_swa = any(sliding) and not all(sliding)
        self.hybrid_layer_pattern = [int(is_sliding) for is_sliding in sliding]

    @property
    def keys_before(self) -> int:
        """Keys before its own that a query of a sliding layer sees."""
        return self.sliding_window - (not self.window_inclusive)


def _agreed(key: str, value, other, where: str, absent):
    if value is not None and other is not None and value != other:
        raise ValueError(f"config.json: {key} is {value!r} but {where} says {other!r}; correct one of them")
    return next(v for v in (value, other, absent) if v is not None)


AutoConfig.register("cohere2_moe", NorthConfig, exist_ok=True)
