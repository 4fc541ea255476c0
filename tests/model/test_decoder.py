"""What the recordings do not hold: packing, padding, block-wise windows, caches with slots, both expert paths."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from north_jax.model import Decoder, ModelConfig, Tables, attention, init_cache, moe, own_pages

TINY = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=16,
    prefix_dense_intermediate_size=48,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    sliding_window=8,
    initializer_range=0.2,
)


def decoder(moe="dense", attention="auto", **changes):
    return Decoder(dataclasses.replace(TINY, **changes), rngs=nnx.Rngs(0), attention=attention, moe=moe)


forward = nnx.jit(lambda model, ids_BS, **kwargs: model(ids_BS, **kwargs))


step = nnx.jit(lambda model, ids_BS, positions_BS, cache, tables: model.step(ids_BS, positions_BS, cache, tables))


def ids(*shape, seed=0):
    return jax.random.randint(jax.random.key(seed), shape, 1, TINY.vocab_size)


def close(a, b, atol=2e-5):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol, rtol=0)


def test_spans_are_causal_in_a_document_and_a_window():
    segments = np.asarray([[1] * 13 + [2] * 19, [1] * 7 + [2] * 20 + [0] * 5])
    full, sliding = attention.row_spans(jnp.asarray(segments), jnp.asarray(segments), window=4)
    back = np.arange(32)[:, None] - np.arange(32)
    same = (segments[:, :, None] == segments[:, None]) & (back >= 0)
    for (start, end), expected in ((full, same), (sliding, same & (back < 4))):
        assert start.shape == end.shape == (2, 32)
        seen = (np.arange(32) >= start[..., None]) & (np.arange(32) < end[..., None])
        assert np.array_equal(seen, expected)


def test_the_switches_choose_a_backend_and_refuse_what_it_cannot_do():
    found = [forward(decoder(attention=kind), ids(2, 16)) for kind in ("auto", "xla", "reference")]
    close(found[0], found[1], 0)
    close(found[0], found[2])
    with pytest.raises(ValueError, match="the tpu backend takes heads whose width divides by 128, not"):
        forward(decoder(attention="tpu"), ids(2, 16))
    with pytest.raises(ValueError, match="Decoder: attention 'flash' is not known; choose one of auto, gpu, reference"):
        decoder(attention="flash")
    with pytest.raises(Exception, match="interpret mode"):  # a TPU's kernel, on a CPU
        forward(decoder(moe="tpu"), ids(2, 16))


@pytest.mark.parametrize("platform, calls", [("tpu", 15), ("cpu", 0)])
def test_by_default_kernels_are_used_where_they_run(platform, calls):
    """Forward and backward of a layer's attention: three kernels."""
    config = dataclasses.replace(TINY, head_dim=128)
    graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0), moe="dense"))

    def loss(params, ids_BS):
        return nnx.merge(graph, params).hidden(ids_BS).sum()

    exported = jax.export.export(jax.jit(jax.grad(loss)), platforms=[platform])(params, ids(2, 16))
    assert exported.mlir_module().count("tpu_custom_call") == calls


def test_packed_segments_are_separate_sequences():
    model = decoder()
    parts = [ids(1, n, seed=n) for n in (5, 11, 16)]
    row = jnp.concatenate([*parts, jnp.zeros((1, 8), jnp.int32)], axis=1)
    segments = jnp.asarray([[1] * 5 + [2] * 11 + [3] * 16 + [0] * 8])
    positions = jnp.concatenate([*(jnp.arange(p.shape[1]) for p in parts), jnp.zeros(8, jnp.int32)])[None]
    for kwargs in ({}, {"positions_BS": positions}):  # rotary positions are relative
        packed = forward(model, row, segment_ids_BS=segments, **kwargs)
        close(packed[:, :32], jnp.concatenate([forward(model, p) for p in parts], axis=1))
        assert np.isfinite(packed).all()


def test_padding_gets_no_gradient_and_no_nan():
    model = decoder()
    graph, params = nnx.split(model)
    row, segments = ids(2, 16), jnp.asarray([[1] * 9 + [0] * 7, [0] * 16])

    def loss(params):
        x_BSD = nnx.merge(graph, params).hidden(row, segment_ids_BS=segments)
        return jnp.sum(jnp.where(segments[..., None] > 0, x_BSD, 0.0) ** 2)

    grads = nnx.to_pure_dict(jax.jit(jax.grad(loss))(params))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    unseen = np.setdiff1d(np.arange(TINY.vocab_size), np.asarray(row[0, :9]))
    assert np.abs(grads["embedding_VD"][unseen]).max() == 0


@pytest.mark.parametrize("changes", [{}, {"norm_topk_prob": True}, {"expert_selection_fn": "softmax"}])
def test_dense_and_grouped_experts_agree(changes):
    row = ids(2, 16)
    outputs, grads = [], []
    for kind in ("dense", "grouped"):
        graph, params = nnx.split(decoder(moe=kind, **changes))

        def loss(params, graph=graph):
            logits = nnx.merge(graph, params)(row)
            return jnp.sum(logits**2), logits

        grad, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
        outputs.append(logits)
        grads.append(jax.tree.leaves(grad))
    close(*outputs)
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1.0, float(jnp.abs(a).max())))


def test_router_breaks_ties_by_the_lowest_index():
    weights, indices = moe.route(jnp.asarray([[1.0, 2.0, 2.0, 2.0, 0.0]]), 2, "sigmoid", False)
    assert indices.tolist() == [[1, 2]]
    close(weights, [[0, jax.nn.sigmoid(2.0), jax.nn.sigmoid(2.0), 0, 0]], 1e-7)
    weights, _ = moe.route(jnp.asarray([[1.0, 2.0, 3.0]]), 2, "sigmoid", True)
    close(weights.sum(), 1.0, 1e-6)
    weights, _ = moe.route(jnp.asarray([[1.0, 2.0, 3.0]]), 2, "softmax", False)
    close(weights, [[0, jax.nn.sigmoid(-1.0), jax.nn.sigmoid(1.0)]], 1e-6)


def test_router_works_in_float32_on_bfloat16_logits():
    weights, _ = moe.route(jnp.asarray([[1.0, 2.0]], jnp.bfloat16), 1, "sigmoid", False)
    assert weights.dtype == jnp.float32


def test_cached_chunks_in_scattered_pages_equal_one_pass():
    model = decoder()
    rows = ids(2, 40)
    expected = forward(model, rows)
    # Fed in chunks of different sizes, the last of them padded at the end. Pages lie anywhere, and those of sliding
    # layers are used again when they have left the window of 8 tokens.
    cache = init_cache(model.config, 16, 8, sliding_pages=10)
    cache = jax.tree.map(lambda x: x + 7.0, cache)  # what an earlier request left behind must not be seen
    full = jnp.asarray([[3, 9, 1, 15, 6], [2, 14, 4, 5, 11]])
    got = []
    for start, stop, pad, sliding, first in (
        (0, 16, 0, [[6, 0], [1, 3]], 0),
        (16, 17, 0, [[0, 7], [3, 4]], 1),
        (17, 18, 0, [[0, 7], [3, 4]], 1),
        (18, 34, 0, [[0, 7, 6, 2], [3, 4, 1, 5]], 1),
        (34, 40, 2, [[6, 2], [1, 5]], 3),
    ):
        positions = jnp.tile(jnp.arange(start, stop), (2, 1))
        x_BSD, cache = step(
            model,
            jnp.pad(rows[:, start:stop], ((0, 0), (0, pad))),
            jnp.pad(positions, ((0, 0), (0, pad)), constant_values=-1),
            cache,
            Tables(full, jnp.asarray(sliding), jnp.asarray([first, first])),
        )
        assert np.isfinite(x_BSD).all()
        got.append(x_BSD[:, : stop - start])
    close(model.logits(jnp.concatenate(got, axis=1)), expected)
    written = {True: set(range(8)), False: set(np.asarray(full).ravel().tolist())}
    for i, layer in enumerate(cache.v):
        others = sorted(set(range(layer.shape[1])) - written[model.config.is_sliding(i)])
        assert others and (np.asarray(layer)[:, others] == 7.0).all()


def test_rows_decode_at_their_own_positions():
    model = decoder()
    rows = ids(3, 30)
    expected = forward(model, rows)
    lengths = np.asarray([5, 29, 12])
    tables = own_pages(3, 32, 16)
    cache = init_cache(model.config, 6, 16)
    fill = np.where(np.arange(29) < lengths[:, None], np.arange(29), -1)
    _, cache = step(model, rows[:, :29], jnp.asarray(fill), cache, tables)
    x_BSD, cache = step(model, rows[np.arange(3), lengths][:, None], jnp.asarray(lengths[:, None]), cache, tables)
    close(model.logits(x_BSD[:, 0]), expected[np.arange(3), lengths])
    # A row without a request rides along as padding.
    before = jax.tree.leaves(cache)
    positions = jnp.asarray([[6], [-1], [13]])
    x_BSD, cache = step(model, rows[jnp.arange(3), jnp.asarray([6, 0, 13])][:, None], positions, cache, tables)
    close(model.logits(x_BSD[0, 0]), expected[0, 6])
    close(model.logits(x_BSD[2, 0]), expected[2, 13])
    assert all((a[2:4] == b[2:4]).all() for a, b in zip(before, jax.tree.leaves(cache), strict=True))


def test_the_cache_is_updated_in_place():
    model = decoder()
    graph, params = nnx.split(model)

    def feed(params, ids_BS, positions_BS, cache, tables):
        return nnx.merge(graph, params).step(ids_BS, positions_BS, cache, tables)[1]

    donating = jax.jit(feed, donate_argnums=3)
    cache = init_cache(model.config, 4, 64)
    held = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    cache = donating(params, ids(4, 1), jnp.zeros((4, 1), jnp.int32), cache, own_pages(4, 64, 64))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)] == held


def test_models_of_one_config_share_a_compilation():
    one, other = (nnx.split(Decoder(TINY, rngs=nnx.Rngs(seed)))[0] for seed in range(2))
    assert one == other


def test_bfloat16_parameters_give_float32_logits():
    model = Decoder(TINY, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    logits = forward(model, ids(1, 16))
    assert logits.dtype == jnp.float32
    assert np.isfinite(logits).all()


def test_refuses_an_unknown_expert_path():
    with pytest.raises(ValueError, match="moe 'sparse' is not known"):
        decoder(moe="sparse")
