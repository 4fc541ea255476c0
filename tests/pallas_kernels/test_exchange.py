"""Every way to exchange tokens between experts' devices against one device, and what it compiles to on chips."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import needs_compiler
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from north_jax.parallel.collectives import collectives
from pallas_kernels import aot
from pallas_kernels.dispatch import METHODS, combine, exchange, gather, methods, sort_by_expert
from pallas_kernels.grouped_matmul import grouped_matmul

N, C, D, F, E = 64, 2, 16, 8, 8  # tokens of all devices, and experts of all devices
BOTH = P(("data", "expert"))


def mlp(x_PD, sizes_E, up_EDF, down_EFD):
    """Two layers by expert, and what a kernel may leave in the rows that are nobody's."""
    product = functools.partial(grouped_matmul, backend="xla")  # the kernels want check_vma=False
    out_PD = product(jax.nn.silu(product(x_PD, up_EDF, sizes_E)), down_EFD, sizes_E)
    return jnp.where(jnp.arange(len(out_PD))[:, None] < jnp.sum(sizes_E), out_PD, jnp.nan)


def one_device(x_ND, weights_NC, indices_NC, up_EDF, down_EFD):
    order_P, inverse_NC, sizes_E = sort_by_expert(indices_NC, len(up_EDF))
    out_PD = mlp(gather(x_ND, order_P, inverse_NC), sizes_E, up_EDF, down_EFD)
    return combine(out_PD, weights_NC, order_P, inverse_NC)


def over(mesh, method, chunks=1, factor=None, experts=mlp):
    """The exchange on arrays of all tokens: they over both axes of the mesh, the experts over one."""

    def local(x_ND, weights_NC, indices_NC, up_EDF, down_EFD):
        out_ND, dropped = exchange(
            x_ND,
            weights_NC,
            indices_NC,
            functools.partial(experts, up_EDF=up_EDF, down_EFD=down_EFD),
            num_experts=len(up_EDF) * mesh.shape["expert"],
            axis_name="expert",
            method=method,
            chunks=chunks,
            capacity_factor=factor,
        )
        return out_ND, dropped[None]

    specs = (BOTH, BOTH, BOTH, P("expert"), P("expert"))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(BOTH, P("data")))


def value_and_gradients(function):
    """Output, what function returns beside it, and the gradients of a sum that no output leaves out."""

    @jax.jit
    def run(x, weights, indices, up, down):
        def loss(x, weights, up, down):
            out, *beside = function(x, weights, indices, up, down)
            return jnp.sum(jnp.sin(out.astype(jnp.float32) + jnp.arange(out.shape[1]))), (out, *beside)

        (_, out), grads = jax.value_and_grad(loss, argnums=range(4), has_aux=True)(x, weights, up, down)
        return out, grads

    return run


def inputs(loads: str):
    keys = jax.random.split(jax.random.key(0), 5)
    if loads == "all to one device":
        indices = jnp.broadcast_to(jnp.asarray([7, 6]), (N, C))
    elif loads == "all to one expert":
        indices = jnp.zeros((N, C), jnp.int32)
    else:  # expert 3 has no tokens, expert 0 many
        logits = jax.random.normal(keys[4], (N, E)) + jnp.asarray([2, 0, 0, -99, 0, 0, 1, 0])
        indices = jax.lax.top_k(logits, C)[1]
    x, weights = jax.random.normal(keys[0], (N, D)), jax.random.uniform(keys[1], (N, C))
    up, down = jax.random.normal(keys[2], (E, D, F)) / 4, jax.random.normal(keys[3], (E, F, D)) / 4
    return x, weights, indices.astype(jnp.int32), up, down


def cpu_mesh(experts: int) -> Mesh:
    return jax.make_mesh((8 // experts, experts), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


@functools.cache
def on_one_device(loads):
    return value_and_gradients(lambda *a: (one_device(*a),))(*inputs(loads))


def close(found, expected):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("experts", "chunks"), [(1, 1), (2, 1), (4, 2), (8, 1)])
def test_many_devices_are_one(method, experts, chunks):
    run = value_and_gradients(over(cpu_mesh(experts), method, chunks))
    for loads in ("ragged", "all to one device", "all to one expert"):
        (out, dropped), grads = run(*inputs(loads))
        (expected,), expected_grads = on_one_device(loads)
        close((out, *grads), (expected, *expected_grads))
        assert not dropped.any(), loads


def ragged_by_definition(rows, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """jax.lax.ragged_all_to_all as its documentation says; NaN where a device expects another size than is sent."""
    me = jax.lax.axis_index(axis_name)
    rows_SPD = jax.lax.all_gather(rows, axis_name)
    taken_S, sent_S, begin_S = (
        jax.lax.all_gather(a, axis_name)[:, me] for a in (input_offsets, send_sizes, output_offsets)
    )
    for s in range(len(rows_SPD)):
        at = jnp.arange(len(output)) - begin_S[s]
        block = jnp.take(rows_SPD[s], taken_S[s] + at, axis=0, mode="clip")
        output = jnp.where(((at >= 0) & (at < sent_S[s]))[:, None], block, output)
    return jnp.where(jnp.all(recv_sizes == sent_S), output, jnp.nan)


def test_what_ragged_asks_of_a_chip_is_what_the_stand_in_does(monkeypatch):
    """No CPU runs ragged_all_to_all, so the offsets and sizes that chips are given are run on its definition."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_by_definition)
    monkeypatch.setattr(methods, "_move_dense", methods._move_ragged)
    run = value_and_gradients(over(cpu_mesh(4), "ragged"))
    for loads in ("ragged", "all to one device"):
        (out, _), grads = run(*inputs(loads))
        (expected,), expected_grads = on_one_device(loads)
        close((out, *grads), (expected, *expected_grads))


def first_come(indices_NC, devices, chunks, room):
    """The pairs that find room, [N, C]: of each device's chunk, the first `room` ones for every device of experts."""
    kept_NC = np.zeros(indices_NC.shape, bool)
    for rows in np.split(np.arange(len(indices_NC)), 8 * chunks):
        used = np.zeros(devices, int)
        for n in rows:
            for c, device in enumerate(indices_NC[n] // (E // devices)):
                kept_NC[n, c] = used[device] < room
                used[device] += 1
    return kept_NC


def test_what_finds_no_room_is_counted_and_adds_nothing():
    # Each chunk of a device has 4 tokens, 8 pairs, for 4 devices; a factor of 1.3 is room for 2.6, rounded up.
    devices, chunks, factor, room = 4, 2, 1.3, 3
    x, weights, indices, *matrices = inputs("ragged")
    kept = first_come(np.asarray(indices), devices, chunks, room)
    run = value_and_gradients(over(cpu_mesh(devices), "capacity", chunks, factor))
    (out, dropped), grads = run(x, weights, indices, *matrices)
    plain = value_and_gradients(lambda x, weights, *a: (one_device(x, jnp.where(kept, weights, 0), *a),))
    (expected,), expected_grads = plain(x, weights, indices, *matrices)
    close((out, *grads), (expected, *expected_grads))
    assert 0 < dropped.sum() == np.sum(~kept) < kept.size
    np.testing.assert_array_equal(dropped, np.sum(~kept.reshape(2, -1), axis=1))  # one count per group of experts


TARGETS = {"v5p": None, "h100": "1x1x8"}
NAMED = {
    "ring": {"all-gather", "reduce-scatter"},
    "ragged": {"ragged-all-to-all"},
    "capacity": {"all-to-all"},
}


@functools.cache
def compiled(chip, method, *, differentiated, N=256, C=2, D=128, E=32):
    """(text, collectives) compiled for all devices of a topology, N tokens on each. Experts have no matrices."""
    needs_compiler(chip)
    devices = aot.devices(chip, TARGETS[chip])
    mesh = Mesh(np.array(devices).reshape(1, -1), ("data", "expert"))
    function = over(mesh, method, experts=lambda x_PD, sizes_E, up_EDF, down_EFD: jax.nn.silu(x_PD))
    N *= len(devices)

    def placed(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    tokens = ((N, D), jnp.bfloat16), ((N, C), jnp.float32), ((N, C), jnp.int32)
    matrices = ((E, D, D), jnp.bfloat16), ((E, D, D), jnp.bfloat16)
    arguments = [placed(*a, BOTH) for a in tokens] + [placed(*a, P("expert")) for a in matrices]
    with jax.set_mesh(mesh):
        run = jax.jit(value_and_gradients(function) if differentiated else function)
        text = run.lower(*arguments).compile().as_text()
    return text, [one for one in collectives(text, mesh) if one.kind != "all-reduce"]  # of the loss, and of `dropped`


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chip", TARGETS)
def test_compiles_with_gradients_to_its_collectives(chip, method):
    text, found = compiled(chip, method, differentiated=True)
    assert {one.kind for one in found} - {"all-gather"} == NAMED[method] - {"all-gather"}
    assert "all-gather" not in NAMED[method] or "all-gather" in text
    # No scatter at all: the dispatch's own gradients gather, the exchange's exchange.
    assert not re.findall(r"(?<!reduce-)scatter\(| sort\(", text)


@pytest.mark.parametrize("method", METHODS)
def test_bytes_sent_are_the_docstrings(method):
    G, N, C, D, E, b = 8, 256, 2, 128, 32, 2
    R = N * C
    forward = {
        "ring": (G - 1) * N * (2 * D * b + C * (4 + 4)),
        "ragged": 2 * N * C * D * b + (G - 1) * E * 4,  # all pairs for other devices: what the shapes have room for
        "capacity": 2 * (G - 1) * R * D * b + (G - 1) * R * 4,
    }
    backward = {
        "ring": (G - 1) * N * (2 * D * b + C * 4),
        "ragged": 2 * N * C * D * b,
        "capacity": 2 * (G - 1) * R * D * b,
    }
    for differentiated, expected in ((False, forward[method]), (True, forward[method] + backward[method])):
        _, found = compiled("h100", method, differentiated=differentiated)
        assert sum(one.bytes for one in found) == expected


def test_refuses_by_name():
    arguments = inputs("ragged")

    def call(method="ring", arguments=arguments, **options):
        jax.eval_shape(over(cpu_mesh(2), method, **options), *arguments)

    with pytest.raises(ValueError, match="method 'magic' is not known"):
        call("magic")
    with pytest.raises(ValueError, match="8 tokens do not divide into 3 chunks"):
        call(chunks=3)
    with pytest.raises(ValueError, match="'capacity' alone has one"):
        call(factor=2.0)
    with pytest.raises(ValueError, match=r"indices \(8, 1\) do not fit"):
        call(arguments=(*arguments[:2], arguments[2][:, :1], *arguments[3:]))
    with pytest.raises(ValueError, match="7 experts do not divide over 2 devices"):
        x, weights, indices, *_ = arguments
        local = functools.partial(exchange, experts=None, num_experts=7, axis_name="expert", method="ring")
        jax.eval_shape(
            jax.shard_map(local, mesh=cpu_mesh(2), in_specs=BOTH, out_specs=(BOTH, P())), x, weights, indices
        )
