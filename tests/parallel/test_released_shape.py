"""A training step of the released model's shape, narrow and shallow, on eight devices."""

import jax
import numpy as np
import pytest
from flax import nnx

from north_jax.model import Decoder, ModelConfig, blocks
from north_jax.parallel import make_mesh
from north_jax.train.loss import SFT
from north_jax.train.optimizer import make_optimizer, make_schedule
from north_jax.train.step import init_state, make_train_step, shard_batch

CONFIG = ModelConfig(
    vocab_size=256,
    hidden_size=16,
    intermediate_size=8,
    prefix_dense_intermediate_size=32,
    num_hidden_layers=9,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    num_experts=128,
    num_experts_per_tok=8,
    sliding_window=128,
    initializer_range=0.1,
    dtype="float32",
)


@pytest.mark.timeout(600)
def test_two_steps_with_all_axes_that_split_tokens():
    """128 experts, 8 of them a token; windows and global layers, twice; 8,192 tokens in rows of documents."""
    mesh = make_mesh(fsdp=2, expert=2, context=2)
    model = blocks.stack(Decoder(CONFIG, rngs=nnx.Rngs(0)), "block")
    assert model.stacked
    optimizer = make_optimizer(make_schedule(3e-3, 10), compute_dtype="bfloat16")
    state, step = init_state(model, optimizer, mesh), make_train_step(SFT, optimizer, mesh)
    segments_BS = np.repeat(np.arange(1, 9), 256).reshape(1, 2048).repeat(4, axis=0).astype(np.int32)
    segments_BS[:, 1900:] = 0
    batch = {
        "ids_BS": np.random.default_rng(0).integers(0, 16, segments_BS.shape, np.int32),
        "segment_ids_BS": segments_BS,
        "positions_BS": np.tile(np.arange(256, dtype=np.int32), (4, 8)),
        "weights_BS": (segments_BS > 0).astype(np.float32),
    }
    batch, losses = shard_batch(batch, mesh), []
    for _ in range(2):
        with jax.transfer_guard("disallow"):
            state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert metrics["tokens"] == 4 * 1900
    assert abs(losses[0] - np.log(256)) < 0.5 and losses[1] < losses[0]
