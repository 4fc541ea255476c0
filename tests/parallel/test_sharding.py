"""The sharding table, and a sharded forward and backward pass against one device, on eight virtual CPU devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from north_jax.model import Decoder, ModelConfig
from north_jax.parallel import AXES, batch_sharding, make_mesh, parameter_shardings, shard_model, sharding, spec

TINY = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=16,
    prefix_dense_intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    sliding_window=8,
    sliding_window_pattern=2,
    initializer_range=0.2,
)


def loss_and_grad(graph):
    def loss(params, ids_BS, segments_BS):
        logits_BSV = nnx.merge(graph, params)(ids_BS, segment_ids_BS=segments_BS)
        logps = jax.nn.log_softmax(logits_BSV[:, :-1])
        picked = jnp.take_along_axis(logps, ids_BS[:, 1:, None], axis=-1)[..., 0]
        return -jnp.mean(jnp.where(segments_BS[:, 1:] > 0, picked, 0.0))

    return jax.value_and_grad(loss)


@pytest.mark.parametrize("moe", ["dense", "grouped"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 8},
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"fsdp": 2, "expert": 4},
        {"expert": 2, "tensor": 2, "data": -1},
    ],
    ids=lambda sizes: "-".join(f"{axis}{size}" for axis, size in sizes.items()),
)
def test_sharded_equals_one_device(sizes, moe):
    model = Decoder(TINY, rngs=nnx.Rngs(0), moe=moe)
    ids_BS = jax.random.randint(jax.random.key(1), (8, 24), 1, TINY.vocab_size)
    segments_BS = jnp.asarray([[1] * 10 + [2] * 10 + [0] * 4] * 8)
    graph, params = nnx.split(model)
    value, grads = jax.jit(loss_and_grad(graph))(params, ids_BS, segments_BS)

    mesh = make_mesh(**sizes)
    shardings = parameter_shardings(mesh, params)
    rows = batch_sharding(mesh)
    function = jax.jit(
        loss_and_grad(graph),
        in_shardings=(shardings, rows, rows),
        out_shardings=(NamedSharding(mesh, PartitionSpec()), shardings),
    )
    shard_model(mesh, model)
    sharded = nnx.state(model, nnx.Param)
    sharded_value, sharded_grads = function(sharded, *jax.device_put((ids_BS, segments_BS), rows))
    np.testing.assert_allclose(sharded_value, value, rtol=1e-5)
    for ours, expected in zip(jax.tree.leaves(sharded_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * float(jnp.abs(expected).max()))


def test_parameters_lie_as_the_table_says():
    mesh = make_mesh(fsdp=2, expert=2, tensor=2)
    model = Decoder(TINY, rngs=nnx.Rngs(0))
    shard_model(mesh, model)
    layer = model.layers[1]
    assert layer.mlp.gate_EDF[...].sharding.spec == PartitionSpec("expert", "fsdp", "tensor")
    assert layer.attention.q_DHK[...].sharding.spec == PartitionSpec("fsdp", "tensor", None)
    assert layer.mlp.gate_EDF[...].addressable_shards[0].data.shape == (2, 16, 8)


def test_every_parameter_axis_is_in_the_table():
    model = nnx.eval_shape(lambda: Decoder(TINY, rngs=nnx.Rngs(0)))
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        axes = param.get_metadata("axes")
        assert len(axes) == len(param.shape), path
        spec(axes)


def test_two_dimensions_may_not_claim_one_mesh_axis():
    with pytest.raises(ValueError, match="'mlp' and 'heads' both claim mesh axis 'tensor'"):
        spec(("heads", "mlp"))
    with pytest.raises(ValueError, match="'embed' and 'batch' both claim mesh axis 'fsdp'"):
        spec(("batch", "embed"))
    with pytest.raises(ValueError, match="'width' is not in the sharding table"):
        spec(("width",))
    assert set(AXES) == {axis for axes in sharding.RULES.values() for axis in axes}


def test_an_axis_that_does_not_divide_is_named():
    model = nnx.eval_shape(lambda: Decoder(dataclasses.replace(TINY, num_experts=6), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"parameter layers\.1\.mlp\.\w+ of shape \(6, .* does not divide"):
        parameter_shardings(make_mesh(expert=4, data=2), nnx.state(model, nnx.Param))


def test_mesh_must_fit_the_devices():
    assert dict(make_mesh(data=-1, tensor=2).shape) == {"data": 4, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2}
    with pytest.raises(
        ValueError, match="mesh data=3 x fsdp=1 x expert=1 x context=1 x tensor=1 does not fit 8 devices"
    ):
        make_mesh(data=3)
    with pytest.raises(ValueError, match="does not fit 8 devices"):
        make_mesh(data=-1, fsdp=-1)
