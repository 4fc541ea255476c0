"""Experts over a mesh against one device: values, gradients, what travels, and what their load is called."""

import collections
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import needs_compiler
from flax import nnx
from jax.sharding import NamedSharding

from north_jax.model import Decoder, ModelConfig, blocks, init_cache, moe, own_pages
from north_jax.parallel import batch_sharding, make_mesh, parameter_shardings, shard_model, spec
from north_jax.parallel.collectives import KINDS, collectives
from north_jax.train.loss import sft_loss
from pallas_kernels import aot
from pallas_kernels.dispatch import METHODS

B, S, D, F, E, C = 8, 8, 16, 16, 8, 2
AXES = (
    ("batch", "sequence", None),
    ("embed", "router"),
    ("expert", "embed", "expert_mlp"),
    ("expert", "embed", "expert_mlp"),
    ("expert", "expert_mlp", "embed"),
)
CHOOSE = functools.partial(moe.route, chosen=C, selection="sigmoid", normalise=False)


@functools.cache
def arguments(loads: str):
    """x_BSD, whose first number is 1, so that the router's first row says which experts are preferred; the weights."""
    keys = jax.random.split(jax.random.key(0), 5)
    favour = {
        "even": [0] * E,
        "ragged": [4, 0, 0, -99, 0, 0, 1, 0],  # nobody at expert 3, many at 0
        "all to one device": [0] * (E - C) + [99] * C,
        "all to one expert": [0] * (E - 1) + [99],
    }[loads]
    x_BSD = jax.random.normal(keys[0], (B, S, D)).at[..., 0].set(1)
    router_DE = jax.random.normal(keys[1], (D, E)).at[0].set(jnp.asarray(favour, jnp.float32))
    gate_EDF, up_EDF = (jax.random.normal(key, (E, D, F)) / 4 for key in keys[2:4])
    return x_BSD, router_DE, gate_EDF, up_EDF, jax.random.normal(keys[4], (E, F, D)) / 4


def value_and_gradients(method="auto", choose=CHOOSE):
    """(out_BSD, indices_BSC) and the gradients, in everything, of a sum that no output leaves out."""

    def loss(*arguments):
        out_BSD, _, _, indices_BSC = moe.mixture(*arguments, choose, backend="auto", method=method)
        return jnp.sum(jnp.sin(out_BSD + jnp.arange(D))), (out_BSD, indices_BSC)

    return jax.value_and_grad(loss, argnums=range(5), has_aux=True)


@functools.cache
def on_one_device(loads):
    assert jax.sharding.get_abstract_mesh().empty
    return jax.jit(value_and_gradients())(*arguments(loads))


def close(found, expected):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def compare(mesh, loads_of_all, **how):
    shardings = tuple(NamedSharding(mesh, spec(axes)) for axes in AXES)
    references = [on_one_device(loads) for loads in loads_of_all]  # before there is a mesh
    with jax.set_mesh(mesh):
        run = jax.jit(value_and_gradients(**how))
        for loads, expected in zip(loads_of_all, references, strict=True):
            close(run(*jax.device_put(arguments(loads), shardings)), expected)


MESHES = (
    {"data": 8},
    {"fsdp": 8},
    {"expert": 8},
    {"tensor": 8},
    {"data": 2, "fsdp": 2, "expert": 2},
    {"expert": 4, "tensor": 2},
    {"expert": 2, "context": 2, "tensor": 2},
)


@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "-".join(f"{axis}{n}" for axis, n in sizes.items()))
def test_a_mesh_is_one_device(sizes):
    compare(make_mesh(**sizes), ("even", "ragged", "all to one device", "all to one expert"))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_and_several_chunks_are_one_device(method, monkeypatch):
    monkeypatch.setattr(moe, "CHUNK_TOKENS", 5)  # of 16 tokens on a device: not three chunks, which do not divide
    compare(make_mesh(expert=4, tensor=2), ("ragged", "all to one device"), method=method)


def test_the_loads_are_what_they_are_called():
    def counts(loads):
        return np.bincount(np.ravel(on_one_device(loads)[0][1][1]), minlength=E)

    assert counts("even").min() > 0
    assert counts("ragged")[3] == 0 and counts("ragged")[0] > 2 * counts("ragged").mean()
    assert (counts("all to one device") == [0] * (E - C) + [B * S] * C).all()
    assert counts("all to one expert")[-1] == B * S


def test_a_lone_row_is_spread_over_devices_that_split_rows():
    """As a sampler decodes: one row, one token."""
    x_BSD, *weights = arguments("even")
    out, *_ = moe.mixture(x_BSD[:1, :1], *weights, CHOOSE, backend="auto", method="auto")
    with jax.set_mesh(make_mesh(expert=4, tensor=2)):
        run = jax.jit(lambda *a: moe.mixture(*a, CHOOSE, backend="auto", method="auto"))
        found, *_ = run(x_BSD[:1, :1], *weights)
    close(found, out)


CONFIG = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=16,
    prefix_dense_intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    sliding_window=8,
    sliding_window_pattern=2,
    initializer_range=0.2,
)


@functools.cache
def a_decoder():
    """(loss, parameters, batch, the loss and its gradients on one device) of stacked layers."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=1 + blocks.FEWEST, layer_types=None)
    graph, params = nnx.split(blocks.stack(Decoder(config, rngs=nnx.Rngs(0), moe="grouped"), "block"))
    ids_BS = jax.random.randint(jax.random.key(1), (8, 24), 1, CONFIG.vocab_size)
    segments_BS = jnp.asarray([[1] * 10 + [2] * 10 + [0] * 4] * 8)
    batch = {
        "ids_BS": ids_BS,
        "segment_ids_BS": segments_BS,
        "positions_BS": jnp.broadcast_to(jnp.arange(24), ids_BS.shape),
        "weights_BS": (segments_BS > 0).astype(jnp.float32),
    }

    def loss(params, batch):
        return sft_loss(nnx.merge(graph, params), batch, batch)[0]

    return loss, params, batch, jax.jit(jax.value_and_grad(loss))(params, batch)


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 8},
        {"fsdp": 8},
        {"expert": 8},
        {"tensor": 2},  # of two key/value heads
        {"data": 2, "fsdp": 2, "expert": 2},
        {"expert": 4, "tensor": 2},
        {"expert": 2, "context": 2, "tensor": 2},
    ],
    ids=str,
)
def test_the_loss_of_a_decoder_and_its_gradients_are_one_devices(quickly_compiled, sizes):
    """Attention, experts and the loss head, each on its shards; context alone is in test_context.py."""
    loss, params, batch, expected = a_decoder()
    mesh = make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    with jax.set_mesh(mesh):
        params = jax.device_put(params, parameter_shardings(mesh, params))
        found = jax.jit(jax.value_and_grad(loss))(params, jax.device_put(batch, batch_sharding(mesh)))
    close(found, expected)


@pytest.mark.parametrize(
    "sizes", [{"data": 2, "fsdp": 2, "expert": 2}, {"expert": 4, "tensor": 2}, {"expert": 2, "context": 4}], ids=str
)
def test_counting_sends_numbers_of_experts_and_no_activations(sizes):
    """Over the devices that have rows, once for all layers; over those that share a row, in each layer.

    These tell each other, once, which tokens are padding.
    """
    graph, params = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(0), moe="grouped"))
    ids_BS = jax.random.randint(jax.random.key(1), (8, 24), 1, CONFIG.vocab_size)
    segments_BS = jnp.asarray([[1] * 10 + [2] * 10 + [0] * 4] * 8)

    def hidden(with_counts):
        return lambda params, ids_BS, segments_BS: nnx.merge(graph, params).hidden(
            ids_BS, segment_ids_BS=segments_BS, with_counts=with_counts
        )

    _, expected = jax.jit(hidden(True))(params, ids_BS, segments_BS)
    assert int(expected[1].sum()) == 8 * 20 * CONFIG.num_experts_per_tok
    mesh = make_mesh(**sizes)
    arguments = (
        jax.device_put(params, parameter_shardings(mesh, params)),
        *jax.device_put((ids_BS, segments_BS), batch_sharding(mesh)),
    )
    with jax.set_mesh(mesh):
        plain, counting = (jax.jit(hidden(counts)).lower(*arguments).compile() for counts in (False, True))
    np.testing.assert_array_equal(counting(*arguments)[1], expected)

    def sent(program):
        found = collectives(program.as_text(), mesh)
        return collections.Counter((one.kind, one.results) for one in found if one.bytes)

    assert not sent(plain) - sent(counting)
    rows, L = 8 // mesh.shape["data"] // mesh.shape["fsdp"] // mesh.shape["expert"], CONFIG.num_hidden_layers
    of_all, of_rows = ("s32", (L, CONFIG.num_experts)), ("s32", (rows, CONFIG.num_experts))
    more = sent(counting) - sent(plain)
    padding = more.pop(("all-gather", (("pred", (rows, 24)),)), 0)
    assert padding == (mesh.shape["context"] > 1) and more
    for kind, results in more:
        assert kind == "all-reduce" and set(results) <= {of_all, of_rows}, (kind, results)


def test_a_samplers_step_of_one_row_is_one_devices():
    cache, tables = init_cache(CONFIG, 8, 16), own_pages(1, 32, 16)
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), moe="grouped")
    ids, positions = jnp.asarray([[5]]), jnp.asarray([[0]])
    expected, _ = jax.jit(lambda model: model.step(ids, positions, cache, tables))(model)
    mesh = make_mesh(expert=2, tensor=2, devices=jax.devices()[:4])
    shard_model(mesh, model)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        found, _ = jax.jit(lambda model: model.step(ids, positions, cache, tables))(model)
    close(found, expected)


def test_an_exchange_that_is_not_known_is_named():
    with pytest.raises(ValueError, match="exchange 'mail' is not known; choose one of auto, ring, ragged, capacity"):
        Decoder(CONFIG, rngs=nnx.Rngs(0), exchange="mail")


def test_on_tpus_every_part_is_our_kernels_on_a_mesh():
    """A kernel that is not on its device's part alone does not lower at all: the compiler cannot split it."""
    config = dataclasses.replace(CONFIG, hidden_size=128, intermediate_size=256, head_dim=128, num_hidden_layers=2)
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), moe="grouped")))
    shardings = parameter_shardings(mesh, params)
    params = jax.tree.map(lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), params, shardings)
    ids = jax.ShapeDtypeStruct((8, 128), jnp.int32, sharding=batch_sharding(mesh))
    batch = dict.fromkeys(("ids_BS", "segment_ids_BS", "positions_BS", "weights_BS"), ids)

    def loss(params, batch):
        return sft_loss(nnx.merge(graph, params), batch, batch)[0]

    with jax.set_mesh(mesh):
        text = jax.export.export(jax.jit(jax.grad(loss)), platforms=["tpu"])(params, batch).mlir_module()
    names = set(re.findall(r'kernel_name = "(\w+)"', text))
    parts = ("gated_forward", "gated_dx", "gated_dw", "grouped_forward", "grouped_dx", "grouped_dw")
    assert names >= {*parts, "loss_head_forward", "loss_head_dx", "loss_head_dw"}


TOKENS, WIDTH, EXPERTS = 256, 128, 32  # a device's tokens, one row; model and expert width


@functools.cache
def compiled(method, **sizes):
    """kind -> collectives of experts and their gradients in bfloat16, compiled for eight H100."""
    needs_compiler("h100")
    mesh = make_mesh(**sizes, devices=aot.devices("h100", "1x1x8"))
    split = mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"]
    shapes = [(split, TOKENS, WIDTH), (WIDTH, EXPERTS), *[(EXPERTS, WIDTH, WIDTH)] * 3]
    shardings = tuple(NamedSharding(mesh, spec(axes)) for axes in AXES)
    placed = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=h) for s, h in zip(shapes, shardings, strict=True)]

    def loss(*arguments):
        out_BSD, *_ = moe.mixture(*arguments, CHOOSE, backend="auto", method=method)
        return jnp.sum(out_BSD.astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        run = jax.jit(jax.grad(loss, argnums=range(5)), out_shardings=shardings)
        found = collectives(run.lower(*placed).compile().as_text(), mesh)
    return {kind: [one for one in found if one.kind == kind] for kind in KINDS}


@pytest.mark.parametrize("method", METHODS)
def test_what_travels_between_experts_is_the_exchange_and_nothing_else(method):
    G, b = 8, 2
    forward, backward = {
        "ring": (
            (G - 1) * TOKENS * (2 * WIDTH * b + C * (4 + 4)),
            (G - 1) * TOKENS * (2 * WIDTH * b + C * 4),
        ),
        # All pairs for other devices: what the shapes have room for.
        "ragged": (2 * TOKENS * C * WIDTH * b + (G - 1) * EXPERTS * 4, 2 * TOKENS * C * WIDTH * b),
        "capacity": (
            2 * (G - 1) * TOKENS * C * WIDTH * b + (G - 1) * TOKENS * C * 4,
            2 * (G - 1) * TOKENS * C * WIDTH * b,
        ),
    }[method]
    found = compiled(method, expert=G)
    (router,) = found["all-reduce"]
    assert router.results == (("bf16", (WIDTH, EXPERTS)),)  # its gradient
    sent = sum(one.bytes for kind in KINDS for one in found[kind])
    assert sent - router.bytes == forward + backward


@pytest.mark.parametrize("method", METHODS)
def test_no_activations_are_gathered_but_by_ring(method):
    """All-gathers are of the matrices over fsdp, once, and of ragged's counts; their gradients are reduce-scattered."""
    found = compiled(method, fsdp=2, expert=2, tensor=2)
    shapes = [shape for one in found["all-gather"] for _, shape in one.results]
    assert any(size >= TOKENS for shape in shapes for size in shape) == (method == "ring")
    half = WIDTH * EXPERTS + 3 * (EXPERTS // 2) * WIDTH * (WIDTH // 2)  # b / 2 bytes of each number: half of it is here
    counts = 4 * EXPERTS if method == "ragged" else 0
    if method != "ring":
        assert sum(one.bytes for one in found["all-gather"]) == half + counts
        assert sum(one.bytes for one in found["reduce-scatter"]) == half
    # The parts of the width, summed over tensor: once, and once in x.
    row, router = ("bf16", (1, TOKENS, WIDTH)), ("bf16", (WIDTH // 2, EXPERTS))
    assert sorted(result for one in found["all-reduce"] for result in one.results) == sorted([row, row, router])
