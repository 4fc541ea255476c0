"""Eight virtual CPU devices, and the partitioner's warnings (tests/parallel), set before anything imports jax."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"
_COUNT = "--xla_force_host_platform_device_count=8"
if _COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}".strip()

import jax  # noqa: E402
import pytest  # noqa: E402
from flax import nnx  # noqa: E402

from north_jax.agents.harness import HARNESSES  # noqa: E402
from north_jax.chat.format import FORMAT_PHRASES, tool_phrases  # noqa: E402
from north_jax.chat.tokenizer import Tokenizer, train_tokenizer  # noqa: E402
from north_jax.model import Decoder, ModelConfig  # noqa: E402
from north_jax.weights import hf  # noqa: E402

pytest.register_assert_rewrite("sandbox_battery")


@pytest.fixture
def quickly_compiled():
    """For programs that take seconds to compile and run for milliseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def untrained(tmp_path_factory):
    """A model folder with tokenizer, served as it is: what it writes is noise, and hardly ever ends by itself."""
    root = tmp_path_factory.mktemp("untrained")
    phrases = (*FORMAT_PHRASES, *tool_phrases(HARNESSES["bash"].tools), *HARNESSES["bash"].phrases)
    train_tokenizer(["say it again"], root / "tokenizer", vocab_size=400, phrases=phrases)
    tokenizer = Tokenizer.load(root / "tokenizer")
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        intermediate_size=8,
        prefix_dense_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        sliding_window=16,
        sliding_window_pattern=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.end_of_turn,
        dtype="float32",
    )
    folder = root / "model"
    hf.save(folder, Decoder(config, rngs=nnx.Rngs(0)), version="0", step=0, tokenizer_dir=root / "tokenizer")
    return folder
