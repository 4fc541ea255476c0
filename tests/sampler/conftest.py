import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from flax import nnx
from scripted_engine import Script, ScriptedEngine, serving

from north_jax.chat import ChatFormat, Tokenizer
from north_jax.model import Decoder, ModelConfig
from north_jax.sampler import process
from north_jax.sampler.client import SamplerClient
from north_jax.weights import hf

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


# --- real servers of both kinds, two of each, for the whole session ---

SERVED_CONTEXT = 120  # what both fill: SGLang asks for a few positions more


@pytest.fixture(scope="session")
def versions(tmp_path_factory, make_model):
    """Folders v0, v1, v2 of one architecture with different weights."""
    root = tmp_path_factory.mktemp("versions")
    for seed in range(3):
        hf.save(root / f"v{seed}", make_model(seed), version=f"v{seed}", step=seed)
    return root


@pytest.fixture(scope="session", params=["embedded", "sglang"])
def pair(request, versions, tmp_path_factory):
    """Two server processes of one kind."""
    if request.param == "sglang" and not (process.ROOT / ".venv-sglang" / "bin" / "python").exists():
        pytest.skip("the SGLang environment is not there; run `make sglang`")
    about = {"kind": request.param, "slots": SLOTS, "context": SERVED_CONTEXT}
    servers = [
        process.SamplerProcess(versions / "v0", tmp_path_factory.mktemp(request.param), **about) for _ in range(2)
    ]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        for server in servers:
            stack.callback(server.stop)
        list(threads.map(lambda server: server.start(), servers))
        yield servers


@pytest.fixture
def servers(pair, versions):
    """Both alive, idle, and back at the weights v0."""
    for server in pair:
        server.checkpoint = versions / "v0"
        server.ensure_alive()

    async def reset(server):
        async with SamplerClient(server.url, vocab_size=VOCAB, context=SERVED_CONTEXT) as client:
            await client.resume()
            await client.abort()
            await client.pause("retract")  # SGLang may still run what it aborts, and would not flush
            await client.update_weights(versions / "v0", "v0")
            await client.resume()

    for server in pair:
        asyncio.run(reset(server))
    return pair


# --- a server whose tokens are scripted, with everything else real: scripted_engine.py ---

SCRIPTED_CONTEXT = 4096


@pytest.fixture(scope="module")
def chat(untrained):
    return ChatFormat(Tokenizer.load(untrained))


@pytest.fixture(scope="module")
def script():
    return Script()


@pytest.fixture(scope="module")
def engine(untrained, script):
    return ScriptedEngine(hf.load(untrained).config, script, context=SCRIPTED_CONTEXT)


@pytest.fixture(scope="module")
def url(engine, untrained, chat):
    with serving(engine, untrained, tokenizer=chat.tokenizer, queue=12) as (url, _, _):
        yield url
