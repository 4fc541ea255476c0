"""The layers of a decoder one after the other; for training stacked, so that a program holds them once.

The released model's 49 layers are a dense one and 48 that differ in nothing but their attention, three sliding and a
global one in turn: a loop, in which the layer's kind decides whose attention is computed.
"""

import functools
import gc
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from north_jax.model.config import ModelConfig
from pallas_kernels.attention import SAVED

# What the backward pass finds of the forward pass; the rest it computes again. "none": all that it needs, which is
# fastest and takes the most memory; "block": what enters a layer; "attention": that, and outputs and log-sum-exps of
# attention, which is then not computed twice; "offload": as "block", in the host's memory.
REMAT = ("none", "block", "attention", "offload")
_ENTERS = "block_input"

# Fewer layers than these compile as quickly one by one, and run without a loop.
FEWEST = 8

Body = Callable[[nnx.Module, jax.Array, Callable], tuple[jax.Array, jax.Array | None]]


def stack(model: nnx.Module, remat: str = "none") -> nnx.Module:
    """The decoder with all layers after the dense prefix stacked: their parameters get a leading axis "layer".

    Takes over the model's arrays, one parameter at a time, so that no more than that is held twice. Fewer than FEWEST
    layers, and what is stacked already, stay as they are. `remat` is what `run` will do. Raises ValueError where it is
    none of REMAT.
    """
    if remat not in REMAT:
        raise ValueError(f"remat {remat!r} is not known; choose one of {', '.join(REMAT)}")
    model.remat = remat
    first = model.config.first_k_dense_replace
    if model.stacked or len(model.layers) - first < FEWEST:
        return model
    layers = list(model.layers)
    parts = [nnx.split(layer) for layer in layers[first:]]
    graph, states = parts[0][0], [dict(nnx.to_flat_state(state)) for _, state in parts]
    del parts
    model.layers, layers = nnx.List(layers[:first]), []
    gc.collect()  # modules are cycles; now nothing else holds the arrays, which go as they are stacked
    flat = {path: jax.tree.map(lambda *xs: jnp.stack(xs), *(s.pop(path) for s in states)) for path in [*states[0]]}
    layer = nnx.merge(graph, nnx.from_flat_state(flat))
    model.layers.append(_with_axes(layer, lambda axes: ("layer", *axes)))
    model.stacked = True
    return model


def unstack(model: nnx.Module) -> nnx.Module:
    """The decoder with its layers one by one again, in arrays of their own. Takes the model over, not its arrays."""
    if model.stacked:
        graph, state = nnx.split(model.layers.pop())
        for i in range(model.config.num_hidden_layers - len(model.layers)):
            layer = nnx.merge(graph, jax.tree.map(lambda x: x[i], state))  # noqa: B023
            model.layers.append(_with_axes(layer, lambda axes: axes[1:]))
        model.stacked = False
    return model


def kinds(config: ModelConfig) -> tuple[list[tuple[bool, bool]], list[int]]:
    """The kinds of attention among the layers that `stack` stacks, and which of them each has, in their order."""
    each = [config.kind(i) for i in range(config.first_k_dense_replace, config.num_hidden_layers)]
    different = sorted(set(each))
    return different, [different.index(kind) for kind in each]


def shares(config: ModelConfig) -> list[Fraction]:
    """How much of the stacked layers each of their kinds is: how often each branch of `run`'s conditional is taken."""
    different, which = kinds(config)
    return [Fraction(which.count(i), len(which)) for i in range(len(different))]


def run(body: Body, attend: Callable, x_BSD: jax.Array, model: nnx.Module) -> tuple[jax.Array, jax.Array | None]:
    """x through (x, kept) = body(layer, x, its attention) of all layers in turn; recomputed as the model says.

    A layer's attention is attend(kind, ...), with the kind as `ModelConfig.kind` has it. Stacked layers go by
    `jax.lax.scan`. Returns x and what was kept, [L, ...], or None where body keeps None.
    """
    kept, alone = [], len(model.layers) - model.stacked

    def of(layer: nnx.Module) -> tuple[Callable, nnx.State]:
        graph, params = nnx.split(layer)

        def one(x_BSD, params, attend):
            return body(nnx.merge(graph, params), checkpoint_name(x_BSD, _ENTERS), attend)

        return one, params

    for i, layer in enumerate(model.layers[:alone]):
        one, params = of(layer)
        one = functools.partial(one, attend=functools.partial(attend, model.config.kind(i)))
        x_BSD, own = _checkpointed(one, model.remat, loop=False)(x_BSD, params)
        kept.append(stacked([own]))
    if model.stacked:
        one, params = of(model.layers[alone])
        different, which = kinds(model.config)
        branches = [functools.partial(attend, kind) for kind in different]

        def step(x_BSD, layer):
            which, params = layer
            return one(x_BSD, params, functools.partial(jax.lax.switch, which, branches))

        step = _checkpointed(step, model.remat, loop=True)
        x_BSD, several = jax.lax.scan(step, x_BSD, (jnp.asarray(which), params))
        kept.append(several)
    return x_BSD, jax.tree.map(lambda *xs: jnp.concatenate(xs), *kept)


def stacked(kept: list) -> jax.Array | None:
    """What each of some layers kept, stacked; None where they kept None."""
    return jax.tree.map(lambda *xs: jnp.stack(xs), *kept)


def _checkpointed(block: Callable, remat: str, loop: bool) -> Callable:
    if remat == "none":
        return block
    policies = jax.checkpoint_policies
    policy = {
        "block": policies.nothing_saveable,
        "attention": policies.save_only_these_names(SAVED),
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[_ENTERS],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[remat]
    # In a loop the compiler cannot take the second computation for the first.
    return jax.checkpoint(block, policy=policy, prevent_cse=not loop)


def _with_axes(layer: nnx.Module, change: Callable) -> nnx.Module:
    for _, node in nnx.iter_graph(layer):
        if isinstance(node, nnx.Param):
            node.set_metadata(axes=change(node.get_metadata("axes")))
    return layer
