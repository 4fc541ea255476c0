import pytest
from flax import nnx

from north_jax.model import Decoder, ModelConfig

VOCAB, CONTEXT, SLOTS = 97, 128, 8
EOS = 3


@pytest.fixture(scope="session")
def tiny_config():
    return ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=16,
        prefix_dense_intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
        sliding_window_pattern=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,  # far from uniform, so that a wrong cache entry shows
        eos_token_id=EOS,
        dtype="float32",
    )


@pytest.fixture(scope="session")
def make_model(tiny_config):
    def make(seed: int) -> Decoder:
        return Decoder(tiny_config, rngs=nnx.Rngs(seed))

    return make


@pytest.fixture(scope="session")
def model(make_model):
    return make_model(0)
