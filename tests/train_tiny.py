"""A tiny model and corpus that the training tests share."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from north_jax.data import Example, Packed, pack
from north_jax.model.config import ModelConfig
from north_jax.model.decoder import Decoder
from north_jax.train.loss import Objective


def tiny_model(seed: int = 0) -> Decoder:
    config = ModelConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=8,
        prefix_dense_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=("sliding_attention", "full_attention"),
        dtype="float32",
    )
    return Decoder(config, rngs=nnx.Rngs(seed))


def tiny_corpus(row_length: int, count: int = 60, seed: int = 0) -> Packed:
    """Counting sequences n, n + 1, …: predictable, so that training must learn them."""
    random = np.random.default_rng(seed)
    examples = []
    for index in range(count):
        length, start = int(random.integers(4, row_length + 1)), int(random.integers(48))
        ids = [(start + i) % 48 for i in range(length)]
        examples.append(Example(f"count-{index}", ids, [0.0, 0.0] + [1.0] * (length - 2)))
    return pack(examples, row_length)


class FourParameters(nnx.Module):
    """One parameter of each kind that the optimizers treat in their own way, wide enough for blocks of 128."""

    def __init__(self, seed: int = 0):
        keys = jax.random.split(jax.random.key(seed), 3)
        self.embedding_VD = nnx.Param(jax.random.normal(keys[0], (8, 512)), axes=("vocab", "embed"))
        self.q_DHK = nnx.Param(jax.random.normal(keys[1], (16, 4, 8)), axes=("embed", "heads", "head_dim"))
        self.gate_EDF = nnx.Param(jax.random.normal(keys[2], (4, 8, 256)), axes=("expert", "embed", "expert_mlp"))
        self.scale_D = nnx.Param(jnp.ones(512), axes=("embed",))


def _four_loss(model: FourParameters, batch, whole):
    """Something with a gradient everywhere that is another in every step."""
    phase = batch["phase_BS"].mean()
    return sum(jnp.sin(3 * w + phase).astype(jnp.float32).sum() for w in jax.tree.leaves(nnx.state(model))), {}


FOUR = Objective(_four_loss)
