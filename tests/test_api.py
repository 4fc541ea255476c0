"""north_jax.load and north_jax.save."""

import numpy as np
from flax import nnx

import north_jax
from north_jax.chat.tokenizer import train_tokenizer
from north_jax.model.config import ModelConfig
from north_jax.model.decoder import Decoder
from north_jax.weights import hf


def test_save_then_load(tmp_path):
    train_tokenizer(iter(["ba be bi"]), tmp_path / "tokenizer", vocab_size=300)
    tokenizer = north_jax.chat.tokenizer.Tokenizer.load(tmp_path / "tokenizer")
    config = ModelConfig.from_hf(
        {
            "model_type": "cohere2_moe",
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "intermediate_size": 8,
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 16,
            "prefix_dense_sliding_window_pattern": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-6,
            "sliding_window": 8,
        }
    )
    model = Decoder(config, rngs=nnx.Rngs(0))
    north_jax.save(tmp_path / "model", model, tokenizer, version="7", step=7)
    again, same_tokenizer = north_jax.load(tmp_path / "model")
    assert same_tokenizer.encode("be bi") == tokenizer.encode("be bi")
    ours, theirs = hf.to_tensors(model), hf.to_tensors(again)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
