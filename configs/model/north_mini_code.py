"""North Mini Code 1.0: 30,484,303,872 parameters, 2,768,343,040 of them active per token beside the embedding.

The keys of the released `config.json`. In bfloat16 the parameters take 61 GB; a shape-only model costs nothing:

    config = ModelConfig.from_hf(get_config().to_dict())
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The released architecture, key by key."""
    return ml_collections.ConfigDict(
        {
            "architectures": ["Cohere2MoeForCausalLM"],
            "model_type": "cohere2_moe",
            "vocab_size": 262144,
            "hidden_size": 2048,
            "num_hidden_layers": 49,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 768,
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 3072,
            "prefix_dense_sliding_window_pattern": 1,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_shared_experts": 0,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-6,
            "layer_norm_eps": 1e-5,
            "rope_theta": 50000,
            "position_embedding_type": "rope_gptj",
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "layer_types": ["full_attention" if i % 4 == 0 else "sliding_attention" for i in range(49)],
            "max_position_embeddings": 500000,
            "use_parallel_block": True,
            "use_gated_activation": True,
            "use_qk_norm": False,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "logit_scale": 1.0,
            "initializer_range": 0.02,
            "dtype": "bfloat16",
            "bos_token_id": 2,
            "eos_token_id": 255001,
            "pad_token_id": 0,
        }
    )
