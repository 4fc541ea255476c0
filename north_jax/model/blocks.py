"""The layers of a decoder that repeat as one stacked block, which a program then holds once: how training has them.

The released model's 49 layers are a dense one and, 12 times, three sliding layers and a global one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from north_jax.model.config import ModelConfig
from pallas_kernels.attention import SAVED

# What the backward pass finds of the forward pass; the rest it computes again. "none": all that it needs, which is
# fastest and takes the most memory; "block": what enters a block (without one, a layer); "attention": that, and outputs
# and log-sum-exps of attention, which is then not computed twice; "offload": as "block", in the host's memory.
REMAT = ("none", "block", "attention", "offload")
_ENTERS = "block_input"

Body = Callable[[nnx.Module, jax.Array], tuple[jax.Array, jax.Array | None]]


def repeated(config: ModelConfig) -> tuple[int, int, int]:
    """(first, period, repeats): from layer `first` on the same `period` kinds of layers come `repeats` times.

    Fewer than `period` layers are left after them.
    """
    kinds = [(config.is_dense(i), config.is_sliding(i), config.uses_rope(i)) for i in range(config.num_hidden_layers)]
    first = sum(dense for dense, *_ in kinds)
    rest = kinds[first:]
    period = next(p for p in range(1, len(rest) + 2) if all(rest[i] == rest[i - p] for i in range(p, len(rest))))
    return first, period, len(rest) // period


def stack(model: nnx.Module, remat: str = "none") -> nnx.Module:
    """The decoder with the layers of its block stacked: their parameters get a leading axis "layer" of `repeats`.

    Takes over the model's arrays, one kind of layer at a time, so that no more than a `period`-th of them is held
    twice. The layers of a decoder in which none repeat, or that are stacked, stay as they are. `remat` is what `run`
    will do. Raises ValueError where it is none of REMAT.
    """
    if remat not in REMAT:
        raise ValueError(f"remat {remat!r} is not known; choose one of {', '.join(REMAT)}")
    model.remat = remat
    first, period, repeats = repeated(model.config)
    if repeats < 2 or model.repeats > 1:
        return model
    layers, end = list(model.layers), first + period * repeats
    block = []
    for i in range(first, first + period):
        graph, *states = *nnx.split(layers[i]), *(nnx.state(layer) for layer in layers[i + period : end : period])
        for j in range(i, end, period):
            layers[j] = None  # its arrays go when they are stacked
        layer = nnx.merge(graph, jax.tree.map(lambda *xs: jnp.stack(xs), *states))
        block.append(_with_axes(layer, lambda axes: ("layer", *axes)))
    return _with_layers(model, [*layers[:first], *block, *layers[end:]], repeats)


def unstack(model: nnx.Module) -> nnx.Module:
    """The decoder with its layers one by one again, in arrays of their own. Takes the model over, not its arrays."""
    if model.repeats == 1:
        return model
    before, block, after = split(model)
    parts = [nnx.split(layer) for layer in block]
    layers = [
        _with_axes(nnx.merge(graph, jax.tree.map(lambda x: x[i], state)), lambda axes: axes[1:])  # noqa: B023
        for i in range(model.repeats)
        for graph, state in parts
    ]
    return _with_layers(model, [*before, *layers, *after], 1)


def split(model: nnx.Module) -> tuple[list, list, list]:
    """The layers (before the stacked block, of it, after it)."""
    layers = list(model.layers)
    if model.repeats == 1:
        return layers, [], []
    first, period, _ = repeated(model.config)
    return layers[:first], layers[first : first + period], layers[first + period :]


def run(body: Body, x_BSD: jax.Array, model: nnx.Module) -> tuple[jax.Array, jax.Array | None]:
    """x through (x, kept) = body(layer, x) of all layers in turn; recomputed as the model says.

    Stacked layers go by `jax.lax.scan`. Returns x and what was kept, [L, ...], or None where body keeps None.
    """
    kept = []

    def through(layers: list, x_BSD: jax.Array, loop: bool) -> jax.Array:
        graph, params = nnx.split(nnx.List(layers))

        def block(x_BSD, params):
            x_BSD, ones = checkpoint_name(x_BSD, _ENTERS), []
            for layer in nnx.merge(graph, params):
                x_BSD, one = body(layer, x_BSD)
                ones.append(one)
            return x_BSD, stacked(ones)

        block = _checkpointed(block, model.remat, loop)
        x_BSD, several = jax.lax.scan(block, x_BSD, params) if loop else block(x_BSD, params)
        if loop:
            several = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), several)
        kept.append(several)
        return x_BSD

    before, block, after = split(model)
    for layer in before:
        x_BSD = through([layer], x_BSD, False)
    if block:
        x_BSD = through(block, x_BSD, True)
    for layer in after:
        x_BSD = through([layer], x_BSD, False)
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


def _with_layers(model: nnx.Module, layers: list, repeats: int) -> nnx.Module:
    model.layers, model.repeats = nnx.List(layers), repeats
    return model
