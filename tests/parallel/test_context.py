"""Rows shared by devices against rows on one device: results, gradients, and the bytes that the program sends."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from packed_rows import batch_of
from test_sharding import TINY

from north_jax.model import Decoder, blocks
from north_jax.model.attention import attend_rows, row_spans
from north_jax.parallel import (
    batch_sharding,
    chunk_length,
    make_mesh,
    parameter_shardings,
    spec,
    to_natural,
    to_zigzag,
)
from north_jax.parallel.collectives import Collective, collectives
from north_jax.rl.learner import make_rl_objective
from north_jax.train.loss import token_logprobs
from north_jax.train.optimizer import make_optimizer, make_schedule
from north_jax.train.step import init_state, make_train_step, shard_batch

QUERIES, KEYS = ("batch", "sequence", "heads", "head_dim"), ("batch", "sequence", "kv_heads", "head_dim")


def mesh_of(**sizes):
    return make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])


def on(mesh, function):
    """`function`, traced with this mesh set, as a train step does."""

    @functools.wraps(function)
    def call(*args):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return call


def close(ours, expected):
    """Equal to 1e-5 of the largest number, leaf by leaf."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(np.abs(b).max(), 1e-3))


@pytest.mark.parametrize("c", [2, 4, 8])
def test_a_device_holds_an_early_chunk_and_a_late_one(c):
    mesh = mesh_of(context=c)
    x_BS = jnp.arange(2 * 48).reshape(2, 48)
    zigzag_BS = jax.jit(on(mesh, to_zigzag))(jax.device_put(x_BS, batch_sharding(mesh)))
    chunks_BnL = np.asarray(x_BS).reshape(2, 2 * c, -1)
    for i, shard in enumerate(zigzag_BS.addressable_shards):
        assert shard.device == mesh.devices.flat[i]
        np.testing.assert_array_equal(shard.data, np.concatenate([chunks_BnL[:, i], chunks_BnL[:, -1 - i]], axis=1))
    back_BS = jax.jit(on(mesh, to_natural))(zigzag_BS)
    np.testing.assert_array_equal(back_BS, x_BS)
    assert back_BS.sharding.is_equivalent_to(batch_sharding(mesh), 2)


def model_results(graph):
    """(loss, hidden states in natural order), gradients."""

    def loss(params, batch):
        model = nnx.merge(graph, params)
        ids_BS, segments_BS, positions_BS = (batch[name] for name in ("ids_BS", "segment_ids_BS", "positions_BS"))
        x_BSD = model.hidden(ids_BS, positions_BS=positions_BS, segment_ids_BS=segments_BS)
        logp_BS = token_logprobs(model, ids_BS, segments_BS, positions_BS)
        return -(batch["weights_BS"] * logp_BS).mean(), to_natural(x_BSD)

    return jax.value_and_grad(loss, has_aux=True)


@pytest.fixture(scope="module")
def one_device():
    graph, params = nnx.split(Decoder(TINY, rngs=nnx.Rngs(0), moe="dense"))
    return graph, params, jax.jit(model_results(graph))(params, batch_of(4))


@pytest.mark.parametrize(
    "sizes",
    [
        {"context": 2},
        {"context": 4},
        {"context": 8},
        {"fsdp": 2, "context": 4},
        {"expert": 2, "context": 2, "tensor": 2},
    ],
    ids=lambda sizes: "-".join(f"{axis}{size}" for axis, size in sizes.items()),
)
def test_a_model_on_shared_rows_is_the_model_on_one_device(quickly_compiled, one_device, sizes):
    """A window of 8 in chunks of 16, 8 and 4; layers: full with positions, sliding, full without."""
    graph, params, expected = one_device
    mesh = mesh_of(**sizes)
    params = jax.device_put(params, parameter_shardings(mesh, params))
    found = jax.jit(on(mesh, model_results(graph)))(params, shard_batch(batch_of(4), mesh))
    close(found, expected)
    assert found[0][1].sharding.shard_shape((4, 64, 32))[1] == 64 // sizes["context"]


def attention_results(window, backend):
    """segments, q, k, v, gradient of the output, all in natural order -> (output, gradients), in natural order."""

    def results(segments_BS, q, k, v, dout):
        spans = row_spans(segments_BS, segments_BS, window or 1)[window is not None]
        q, k, v, dout = (to_zigzag(x) for x in (q, k, v, dout))
        out, pull = jax.vjp(lambda *qkv: attend_rows(*qkv, spans, window=window, backend=backend), q, k, v)
        return [to_natural(x) for x in (out, *pull(dout))]

    return results


@functools.cache
def compiled(window, c):
    """The same on one device by definition, and on c devices."""
    alone, shared, mesh = attention_results(window, "reference"), attention_results(window, "xla"), mesh_of(context=c)
    return jax.jit(alone), jax.jit(on(mesh, shared), in_shardings=batch_sharding(mesh))


@st.composite
def segments(draw, S):
    """A row of documents side by side, many of one token, and padding after them."""
    lengths = draw(st.lists(st.one_of(st.just(1), st.integers(1, S)), max_size=8))
    row = np.repeat(np.arange(1, len(lengths) + 1), lengths)[:S]
    return np.pad(row, (0, S - len(row))).astype(np.int32)


@pytest.mark.parametrize("c", [2, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 19, 100])
@settings(max_examples=20, deadline=None)
@given(rows=st.lists(segments(32), min_size=2, max_size=2), seed=st.integers(0, 2**31))
def test_attention_over_any_documents(window, c, rows, seed):
    """Chunks of 8 or 4 tokens: windows shorter and longer than one, than several, than the row."""
    draw = np.random.default_rng(seed)
    q, k, v, dout = (draw.normal(size=(2, 32, heads, 8)).astype(np.float32) for heads in (4, 2, 2, 4))
    alone, shared = compiled(window, c)
    for ours, expected in zip(*(f(np.stack(rows), q, k, v, dout) for f in (shared, alone)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * max(np.abs(expected).max(), 1))


def test_rl_takes_the_same_step_on_shared_rows(quickly_compiled):
    """Losses see log-probabilities and entropies in natural order, beside arrays that were never turned."""
    draw = np.random.default_rng(1)
    batch = batch_of(4)
    del batch["weights_BS"]
    shape = batch["ids_BS"].shape
    batch |= {
        "action_BS": (draw.random(shape) < 0.5) & (batch["segment_ids_BS"] > 0),
        "logp_BS": -draw.random(shape, np.float32) * 6,
        "advantage_BS": draw.normal(size=shape).astype(np.float32),
        "denominator_BS": np.full(shape, 50, np.float32),
    }
    optimizer = make_optimizer(make_schedule(1e-2, 100))
    found = []
    for mesh in (mesh_of(data=1), mesh_of(fsdp=2, context=4)):
        state = init_state(Decoder(TINY, rngs=nnx.Rngs(0), moe="dense"), optimizer, mesh)
        state, metrics = make_train_step(make_rl_objective(5.0), optimizer, mesh)(state, shard_batch(batch, mesh))
        found.append((metrics, state.params))
    (expected, _), (ours, params) = found
    assert expected.keys() == ours.keys() >= {"expert_load_max", "expert_load_entropy", "expert_dead_share"}
    for name in expected:
        np.testing.assert_allclose(ours[name], expected[name], rtol=2e-5, atol=2e-5, err_msg=name)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(parameter_shardings(mesh, params)), strict=True):
        assert a.sharding.is_equivalent_to(b, a.ndim)


def test_a_length_that_does_not_divide_is_refused_with_lengths_that_do():
    mesh, message = mesh_of(context=4), "row of 60 tokens does not divide into the 2 x context = 8 chunks .* 56 or 64"
    with pytest.raises(ValueError, match=message):
        shard_batch({"ids_BS": np.zeros((4, 60), np.int32)}, mesh)
    model = Decoder(TINY, rngs=nnx.Rngs(0), moe="dense")
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(on(mesh, model.hidden), jnp.zeros((2, 60), jnp.int32))
    with pytest.raises(ValueError, match=r"multiple of 8, such as 8$"):
        chunk_length(6, 4)
    with pytest.raises(ValueError, match="make batch_rows a multiple of data \\* fsdp \\* expert"):
        shard_batch({"ids_BS": np.zeros((3, 64), np.int32)}, mesh_of(data=2, context=4))


def test_rows_of_their_own_cost_nothing():
    """Without a context axis the program is the one without a mesh; with other axes nothing about rows is exchanged."""
    graph, params = nnx.split(Decoder(TINY, rngs=nnx.Rngs(0), moe="dense"))
    batch = batch_of(8)

    def loss(params, batch):
        fields = (batch[name] for name in ("ids_BS", "segment_ids_BS", "positions_BS"))
        return token_logprobs(nnx.merge(graph, params), *fields).sum()

    plain = jax.jit(loss).lower(params, batch).as_text()
    assert jax.jit(on(mesh_of(data=1), loss)).lower(params, batch).as_text() == plain
    jaxpr = str(jax.make_jaxpr(on(mesh_of(data=4), loss))(params, batch))
    assert "shard_map" in jaxpr and not re.search("ppermute|all_gather|axis_index", jaxpr)


# What a program sends.


def sent(program: jax.stages.Compiled, mesh: Mesh, shares=()) -> dict[str, list[Collective]]:
    """The collectives of each kind, but for those of integers: ids and segments, a number for each token."""
    found = {}
    for one in collectives(program.as_text(), mesh, shares):
        if {word for word, _ in one.results} != {"s32"}:
            found.setdefault(one.kind, []).append(one)
    return found


def total(*lists: list[Collective]) -> int:
    return sum(one.bytes * one.count for list_ in lists for one in list_)


def attention_sends(S, window, c, *, H, G, K, gradient):
    """What the compiled attention of one layer sends, on rows that c devices share."""
    mesh = mesh_of(context=c)

    def described(axes, *shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec(axes)))

    def forward(segments_BS, q, k, v):
        spans = row_spans(segments_BS, segments_BS, window or 1)[window is not None]
        return attend_rows(q, k, v, spans, window=window, backend="xla")

    def both(segments_BS, q, k, v, dout):
        out, pull = jax.vjp(functools.partial(forward, segments_BS), q, k, v)
        return out, pull(dout)

    q, k = described(QUERIES, 1, S, H, K), described(KEYS, 1, S, G, K)
    arguments = (described(("batch", "sequence"), 1, S, dtype=jnp.int32), q, k, k)
    if gradient:
        arguments += (q,)
    return sent(jax.jit(on(mesh, both if gradient else forward)).lower(*arguments).compile(), mesh)


SMALL = {"c": 8, "H": 4, "G": 2, "K": 8}
NORTH = {"c": 8, "H": 32, "G": 4, "K": 128}


def closed_form(S, window, *, c, H, G, K):
    """Of `north_jax.parallel.context`, with B = 1 and b = 4; there are as many for the gradients."""
    if window is None:
        return 2 * (1 - 1 / c) * S * G * K * 4
    return 4 * min(window - 1, S - S // (2 * c)) * G * K * 4


@pytest.mark.parametrize(
    "S, window, sizes",
    [
        (64, None, SMALL),
        (64, 4, SMALL),
        (64, 11, SMALL),
        (64, 1000, SMALL),
        (32768, 4096, NORTH),
        (131072, 4096, NORTH),
        (131072, None, NORTH),
    ],
)
def test_bytes_sent_are_the_closed_form(S, window, sizes):
    forward, both = (attention_sends(S, window, gradient=g, **sizes) for g in (False, True))
    expected = closed_form(S, window, **sizes)
    print(S, window, total(*forward.values()), total(*both.values()) - total(*forward.values()), expected)
    kinds = {"collective-permute"} if window else {"all-gather"}
    assert set(forward) == kinds
    assert set(both) == kinds | (set() if window else {"reduce-scatter"})
    assert abs(total(*forward.values()) / expected - 1) < 0.1
    assert abs((total(*both.values()) - total(*forward.values())) / expected - 1) < 0.1


@pytest.mark.parametrize("window", [None, 11])
def test_a_layer_computed_again_sends_the_forward_bytes_again(window):
    """Three layers in a loop: forward, then forward and back."""
    mesh, S = mesh_of(context=8), 64

    def loss(segments_BS, q):
        spans = row_spans(segments_BS, segments_BS, window or 1)[window is not None]

        @jax.checkpoint
        def layer(q, _):
            k = q[:, :, :2]
            return attend_rows(q, k, jnp.sin(k), spans, window=window, backend="xla"), None

        return jax.lax.scan(layer, q, length=3)[0].sum()

    arguments = jax.device_put((jnp.ones((1, S), jnp.int32), jnp.ones((1, S, 4, 8))), batch_sharding(mesh))
    found = sent(jax.jit(on(mesh, jax.grad(loss, 1))).lower(*arguments).compile(), mesh)
    assert total(*found.values()) == 3 * 3 * closed_form(S, window, **SMALL)


@pytest.mark.parametrize("dense, layers", [(3, 3), (0, 8)], ids=["alone", "stacked"])
def test_only_keys_and_values_travel(dense, layers):
    """A whole model, forward and backward: of the activations, what attention's closed form says, and no more."""
    S, B, c = 128, 2, 8
    config = dataclasses.replace(
        TINY,
        layer_types=None,
        first_k_dense_replace=dense,
        num_hidden_layers=layers,
        sliding_window_pattern=4,
        prefix_dense_sliding_window_pattern=3,
    )
    model = blocks.stack(Decoder(config, rngs=nnx.Rngs(0)))
    assert model.stacked == (dense == 0)
    graph, params = nnx.split(model)
    mesh = mesh_of(context=c)
    params = jax.device_put(params, parameter_shardings(mesh, params))
    batch = shard_batch(batch_of(B, S), mesh)

    def loss(params, batch):
        x_BSD = nnx.merge(graph, params).hidden(batch["ids_BS"], segment_ids_BS=batch["segment_ids_BS"])
        return (x_BSD**2).sum()

    found = sent(jax.jit(on(mesh, jax.grad(loss))).lower(params, batch).compile(), mesh, blocks.shares(config))
    sizes = {"c": c, "H": 4, "G": 2, "K": 16}
    sliding = B * sum(closed_form(S, config.window, **sizes) for i in range(layers) if config.is_sliding(i))
    full = B * sum(closed_form(S, None, **sizes) for i in range(layers) if not config.is_sliding(i))
    assert sliding and full
    assert total(found.pop("collective-permute")) == 2 * sliding
    assert total(found.pop("all-gather")) == total(found.pop("reduce-scatter")) == full
    # Besides: the gradients of the parameters, summed over the devices.
    assert set(found) == {"all-reduce"}
    # (Of a stacked one a layer's part, in each round.)
    parameters = {shape for x in jax.tree.leaves(params) for shape in (x.shape, x.shape[model.stacked :])}
    reduced = {math.prod(shape) for one in found["all-reduce"] for _, shape in one.results}
    assert reduced <= {1, *map(math.prod, parameters)}


@pytest.mark.parametrize("window", [None, 12])
def test_a_tpus_kernels_attend_on_shared_rows(window):
    """Three kernels, forward and backward, for 64 queries and the keys that the devices exchanged."""
    mesh = mesh_of(context=4)

    def both(segments_BS, q, k, v):
        spans = row_spans(segments_BS, segments_BS, window or 1)[window is not None]
        return jax.grad(lambda *qkv: attend_rows(*qkv, spans, window=window, backend="tpu").sum(), (0, 1, 2))(q, k, v)

    q, k = jnp.zeros((1, 256, 4, 128)), jnp.zeros((1, 256, 2, 128))
    traced = jax.jit(on(mesh, both)).trace(jnp.ones((1, 256), jnp.int32), q, k, k)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 3
