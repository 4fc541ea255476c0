"""The layers of a decoder that repeat, stacked by their kind, which a program then holds once: how training has them.

The released model's 49 layers are a dense one and, 12 times, three sliding layers and a global one: a loop of 12 rounds
with a loop of three in it.
"""

import itertools
from collections.abc import Callable

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

Body = Callable[[nnx.Module, jax.Array], tuple[jax.Array, jax.Array | None]]


def repeated(config: ModelConfig) -> tuple[int, tuple[int, ...], int]:
    """(first, runs, repeats): from layer `first` on, runs of so many layers of one kind, all of it `repeats` times.

    (1, (3, 1), 12) of the released model. Fewer than sum(runs) layers are left after them.
    """
    kinds = [(config.is_dense(i), config.is_sliding(i), config.uses_rope(i)) for i in range(config.num_hidden_layers)]
    first = sum(dense for dense, *_ in kinds)
    rest = kinds[first:]
    period = next(p for p in range(1, len(rest) + 2) if all(rest[i] == rest[i - p] for i in range(p, len(rest))))
    runs = tuple(len(list(same)) for _, same in itertools.groupby(rest[:period]))
    return first, runs, len(rest) // period


def stack(model: nnx.Module, remat: str = "none") -> nnx.Module:
    """The decoder with the layers of each run stacked: their parameters get a leading axis "layer" of repeats · run.

    Takes over the model's arrays, one parameter of a run at a time, so that no more than that is held twice. The layers
    of a decoder in which none repeat, or that are stacked, stay as they are. `remat` is what `run` will do. Raises
    ValueError where it is none of REMAT.
    """
    if remat not in REMAT:
        raise ValueError(f"remat {remat!r} is not known; choose one of {', '.join(REMAT)}")
    model.remat = remat
    first, runs, repeats = repeated(model.config)
    if repeats < 2 or model.repeats > 1:
        return model
    layers, period = list(model.layers), sum(runs)
    end = first + period * repeats
    before, after = layers[:first], layers[end:]
    parts = [nnx.split(layer) for layer in layers[first:end]]
    model.layers, layers = nnx.List([]), []  # nothing else holds the arrays, which go as they are stacked
    stacks, start = [], 0
    for run in runs:
        graph, own = parts[start][0], _of_run(start, run, period, repeats)
        states = [dict(nnx.to_flat_state(parts[i][1])) for i in own]
        for i in own:
            parts[i] = None
        flat = {path: jax.tree.map(lambda *xs: jnp.stack(xs), *(s.pop(path) for s in states)) for path in [*states[0]]}
        layer = nnx.merge(graph, nnx.from_flat_state(flat))
        stacks.append(_with_axes(layer, lambda axes: ("layer", *axes)))
        start += run
    return _with_layers(model, [*before, *stacks, *after], repeats)


def _of_run(start: int, run: int, period: int, repeats: int) -> list[int]:
    # Of the layers that repeat, those of the run that begins at `start` in each period, in their order.
    return [r * period + start + i for r in range(repeats) for i in range(run)]


def unstack(model: nnx.Module) -> nnx.Module:
    """The decoder with its layers one by one again, in arrays of their own. Takes the model over, not its arrays."""
    if model.repeats == 1:
        return model
    before, stacks, after = split(model)
    _, runs, repeats = repeated(model.config)
    layers, start = [None] * (sum(runs) * repeats), 0
    for run, (graph, state) in zip(runs, map(nnx.split, stacks), strict=True):
        for i, at in enumerate(_of_run(start, run, sum(runs), repeats)):
            layer = nnx.merge(graph, jax.tree.map(lambda x: x[i], state))  # noqa: B023
            layers[at] = _with_axes(layer, lambda axes: axes[1:])
        start += run
    return _with_layers(model, [*before, *layers, *after], 1)


def split(model: nnx.Module) -> tuple[list, list, list]:
    """The layers (before the stacked ones, the stack of each run, after them)."""
    layers = list(model.layers)
    if model.repeats == 1:
        return layers, [], []
    first, runs, _ = repeated(model.config)
    return layers[:first], layers[first : first + len(runs)], layers[first + len(runs) :]


def run(body: Body, x_BSD: jax.Array, model: nnx.Module) -> tuple[jax.Array, jax.Array | None]:
    """x through (x, kept) = body(layer, x) of all layers in turn; recomputed as the model says.

    Stacked layers go by `jax.lax.scan`. Returns x and what was kept, [L, ...], or None where body keeps None.
    """
    kept = []

    def of(layer: nnx.Module, loop: bool) -> tuple[Callable, nnx.State]:
        graph, params = nnx.split(layer)

        def one(x_BSD, params):
            return body(nnx.merge(graph, params), checkpoint_name(x_BSD, _ENTERS))

        return _checkpointed(one, model.remat, loop), params

    def alone(layer: nnx.Module, x_BSD: jax.Array) -> jax.Array:
        one, params = of(layer, False)
        x_BSD, own = one(x_BSD, params)
        kept.append(stacked([own]))
        return x_BSD

    before, stacks, after = split(model)
    for layer in before:
        x_BSD = alone(layer, x_BSD)
    if stacks:
        ones, params = zip(*(of(layer, True) for layer in stacks), strict=True)
        rounds = jax.tree.map(lambda x: x.reshape(model.repeats, -1, *x.shape[1:]), params)

        def block(x_BSD, params):
            own = []
            for one, layers in zip(ones, params, strict=True):
                x_BSD, several = jax.lax.scan(one, x_BSD, layers)
                own.append(several)
            return x_BSD, _joined(own)

        x_BSD, several = jax.lax.scan(block, x_BSD, rounds)
        kept.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), several))
    for layer in after:
        x_BSD = alone(layer, x_BSD)
    return x_BSD, _joined(kept)


def _joined(kept: list) -> jax.Array | None:
    """What several runs of layers kept, one after the other; None where they kept None."""
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *kept)


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
