"""A cached step as the sampler compiles it for a TPU: the kernel attends, and the pools stay where they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import needs_compiler
from flax import nnx

from north_jax.model import Decoder, ModelConfig, Tables, init_cache
from pallas_kernels import aot

B, P, WINDOW, PAGES = 8, 16, 4096, 16384


def described(head_dim: int):
    """(a decode step, its arguments) of a model of three layers, the last one full, on one device."""
    config = ModelConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=64,
        prefix_dense_intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=head_dim,
        num_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        layer_types=("sliding_attention", "sliding_attention", "full_attention"),
    )
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16))
    graph, params = nnx.split(model)
    cache = jax.eval_shape(functools.partial(init_cache, config, PAGES, P, dtype=jnp.bfloat16))
    whole, windows = (np.zeros((B, W), np.int32) for W in (2048, WINDOW // P + 2))
    tables = Tables(full_BW=whole, sliding_BW=windows, first_B=np.zeros(B, np.int32))
    ids_B1 = np.zeros((B, 1), np.int32)

    def step(params, cache, ids_BS, positions_BS, tables):
        # As in a decode program, where the cache goes round in a loop.
        def once(_, carry):
            x_BSD, cache = nnx.merge(graph, params).step(ids_BS, positions_BS, carry[1], tables, None, "auto")
            return carry[0] + x_BSD, cache

        return jax.lax.fori_loop(0, 2, once, (jnp.zeros((B, 1, config.hidden_size), jnp.bfloat16), cache))

    return step, (params, cache, ids_B1, ids_B1, tables)


@pytest.mark.parametrize("platform, head_dim, calls", [("tpu", 128, 3), ("tpu", 64, 0), ("cpu", 128, 0)])
def test_the_kernel_attends_where_it_can(platform, head_dim, calls):
    step, arguments = described(head_dim)
    exported = jax.export.export(jax.jit(step), platforms=[platform])(*arguments)
    assert exported.mlir_module().count('kernel_name = "paged_attention"') == calls


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
def test_no_pool_is_copied(chip):
    needs_compiler(chip)
    step, arguments = described(128)
    compiled = aot.compile_for(chip, step, *arguments)
    pool = 4 * PAGES * P * 128 * 2
    # The pools that come out are not temporary, and each step writes into them.
    assert compiled.memory_analysis().temp_size_in_bytes < pool / 2
