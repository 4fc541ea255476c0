"""The loss head on a mesh against one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import needs_compiler
from jax.sharding import NamedSharding

from north_jax.parallel import make_mesh, spec
from north_jax.parallel.collectives import collectives
from north_jax.train import head
from pallas_kernels import aot, loss_head

B, S, D, V = 8, 6, 16, 40
AXES = ("batch", "sequence", None), ("vocab", "embed"), ("batch", "sequence")


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    target_BS = jax.random.randint(keys[2], (B, S), 0, V).at[0].set(jnp.asarray([0, V // 2 - 1, V // 2, V - 1, 9, 10]))
    return jax.random.normal(keys[0], (B, S, D)), jax.random.normal(keys[1], (V, D)), target_BS


def value_and_gradients(function):
    """All that it returns, and the gradients of a sum in which every logp and lse counts, and no entropy."""

    def loss(x_BSD, w_VD, target_BS):
        logp_BS, lse_BS, entropy_BS = function(x_BSD, w_VD, target_BS, scale=0.7, with_entropy=True)
        return jnp.sum(jnp.sin(logp_BS) + jnp.cos(lse_BS) + entropy_BS), (logp_BS, lse_BS, entropy_BS)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize(
    "sizes",
    [{"data": 8}, {"tensor": 8}, {"fsdp": 4, "tensor": 2}, {"expert": 2, "context": 2, "tensor": 2}],
    ids=lambda sizes: "-".join(f"{axis}{n}" for axis, n in sizes.items()),
)
def test_a_mesh_is_one_device(sizes):
    expected = value_and_gradients(functools.partial(loss_head.token_logprobs, backend="reference"))(*arguments())
    mesh = make_mesh(**sizes)
    with jax.set_mesh(mesh):
        placed = jax.device_put(arguments(), tuple(NamedSharding(mesh, spec(axes)) for axes in AXES))
        found = value_and_gradients(head.token_logprobs)(*placed)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())


def test_without_a_mesh_it_is_the_kernels_function():
    found = head.token_logprobs(*arguments(), scale=0.7)
    expected = loss_head.token_logprobs(*arguments(), scale=0.7, backend="auto")
    assert len(found) == 2
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_on_tpus_each_runs_the_kernels_on_its_part():
    """Three kernels; between devices go the matrix, over fsdp and back, dx, and over tensor two numbers per token."""
    needs_compiler("v5p")
    mesh = make_mesh(fsdp=2, tensor=2, devices=aot.devices("v5p"))
    shapes = ((2, 512, 128), jnp.bfloat16), ((2048, 128), jnp.bfloat16), ((2, 512), jnp.int32)
    placed = [
        jax.ShapeDtypeStruct(*array, sharding=NamedSharding(mesh, spec(axes)))
        for array, axes in zip(shapes, AXES, strict=True)
    ]

    def loss(x_BSD, w_VD, target_BS):
        return jnp.sum(head.token_logprobs(x_BSD, w_VD, target_BS)[0])

    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*placed).compile().as_text()
    assert {name for name in ("loss_head_forward", "loss_head_dx", "loss_head_dw") if name in text} == {
        "loss_head_forward", "loss_head_dx", "loss_head_dw",
    }  # fmt: skip
    found = collectives(text, mesh)
    assert [one.results for one in found if one.kind == "all-gather"] == [(("bf16", (1024, 128)),)]
    added = {shape for one in found if one.kind == "all-reduce" for _, shape in one.results}
    assert added == {(1024, 128), (1, 512, 128), (1, 512)}
