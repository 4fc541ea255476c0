"""The train state and the one compiled step that SFT and RL share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from north_jax.parallel import batch_sharding, chunk_length, parameter_shardings
from north_jax.train.loss import Batch, Metrics, Objective
from north_jax.train.optimizer import SETTINGS as OPTIMIZER_SETTINGS
from north_jax.train.optimizer import Optimizer, Quantised

# What a run's config says of its steps: the optimizer, in how many parts the rows of a batch are taken, and what of the
# forward pass the backward pass finds (`north_jax.model.blocks.REMAT`).
SETTINGS = {**OPTIMIZER_SETTINGS, "accumulate": 1, "remat": "none"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters, optimizer state, and the steps taken since its schedule began (int32 scalar)."""

    params: nnx.State
    opt_state: Any
    step: jax.Array
    graphdef: nnx.GraphDef = dataclasses.field(metadata={"static": True})

    def model(self) -> nnx.Module:
        """The model with these parameters, which it shares: the next train step takes them away."""
        return nnx.merge(self.graphdef, self.params)


def init_state(model: nnx.Module, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """A state at step 0, laid out on the mesh, its parameters in the type that the optimizer was made for.

    It takes over the model's arrays: do not use `model` afterwards.
    """
    graphdef, params = nnx.split(model, nnx.Param)
    params = optax.tree.cast(params, jnp.dtype(optimizer.param_dtype))
    params = jax.device_put(params, parameter_shardings(mesh, params))
    return _begin(graphdef, params, optimizer, mesh)


def restart(state: TrainState, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """The same parameters at step 0 of a new optimizer and schedule, as a new training stage begins."""
    return _begin(state.graphdef, state.params, optimizer, mesh)


def abstract_state(model: nnx.Module, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """What `init_state` would make of an abstract model (`nnx.eval_shape`): shapes, types and shardings."""
    graphdef, params = nnx.split(model, nnx.Param)
    params = jax.eval_shape(lambda params: optax.tree.cast(params, jnp.dtype(optimizer.param_dtype)), params)
    opt_state = jax.eval_shape(optimizer.transform.init, params)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def described(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return TrainState(
        jax.tree.map(described, params, parameter_shardings(mesh, params)),
        jax.tree.map(described, opt_state, _opt_shardings(opt_state, params, optimizer, mesh)),
        jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
        graphdef,
    )


def _begin(graphdef: nnx.GraphDef, params: nnx.State, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    shapes = jax.eval_shape(optimizer.transform.init, params)
    opt_state = jax.jit(optimizer.transform.init, out_shardings=_opt_shardings(shapes, params, optimizer, mesh))(params)
    step = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(mesh, PartitionSpec()))
    return TrainState(params, opt_state, step, graphdef)


def _opt_shardings(opt_state, params: nnx.State, optimizer: Optimizer, mesh: Mesh):
    # Moments lie where their parameters lie, the scales of quantised ones too; counters are everywhere.
    def one(moment, sharding):
        if isinstance(moment, Quantised):
            return Quantised(sharding, _scales_sharding(moment.scales, sharding))
        return sharding

    return optax.tree_map_params(
        optimizer.transform,
        one,
        opt_state,
        parameter_shardings(mesh, params),
        transform_non_params=lambda _: NamedSharding(mesh, PartitionSpec()),
        # A MaskedNode holds the place of a parameter that another part of the optimizer moves.
        is_leaf=lambda x: isinstance(x, Quantised | optax.MaskedNode),
    )


def _scales_sharding(scales, sharding: NamedSharding) -> NamedSharding:
    # Blocks that do not divide over the mesh axes of the last dimension are on all of their devices.
    try:
        sharding.shard_shape(scales.shape)
        return sharding
    except ValueError:
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1], None))


def shard_batch(batch: Mapping[str, Any], mesh: Mesh) -> Batch:
    """Puts every [B, S] host array, which all processes have whole, on the mesh: each its devices' part.

    Raises ValueError when the rows do not divide over the devices that split the batch, or a row over those that share
    it.
    """
    sharding = batch_sharding(mesh)
    rows = {name: array.shape[0] for name, array in batch.items()}
    if mesh.shape["context"] > 1:
        for array in batch.values():
            chunk_length(array.shape[1], mesh.shape["context"])
    try:
        return {
            name: jax.make_array_from_callback(array.shape, sharding, np.asarray(array).__getitem__)
            for name, array in batch.items()
        }
    except ValueError as error:
        raise ValueError(
            f"batch of {rows} rows does not divide over mesh {dict(mesh.shape)}: make batch_rows a multiple of "
            "data * fsdp * expert"
        ) from error


def make_train_step(
    objective: Objective, optimizer: Optimizer, mesh: Mesh, *, accumulate: int = 1
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Compiles (state, batch) -> (next state, metrics); the old state is donated and cannot be used again.

    `accumulate` n > 1 takes the rows of the batch in n parts, one after the other, and adds their gradients in float32:
    the memory of an n-th of the rows, the same step. To the objective's metrics come "loss", "grad_norm" (before
    clipping) and "lr". Metrics stay on the device: reading one waits for the step. Raises ValueError where the rows do
    not divide.
    """

    def gradients(state: TrainState, batch: Batch):
        """((loss, arrays), gradients) of the batch."""

        def loss_of(params, part):
            if optimizer.compute_dtype != "same":
                params = optax.tree.cast(params, jnp.dtype(optimizer.compute_dtype))
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return objective.loss(nnx.merge(state.graphdef, params), part, batch)

        of_part = jax.value_and_grad(loss_of, has_aux=True)
        if accumulate == 1:
            return of_part(state.params, batch)

        if (rows := len(next(iter(batch.values())))) % accumulate:
            raise ValueError(
                f"a batch of {rows} rows does not divide into accumulate={accumulate} parts; change either"
            )

        def add(sums, part):
            (loss, arrays), grads = of_part(state.params, part)
            return jax.tree.map(jnp.add, sums, (loss, optax.tree.cast(grads, jnp.float32))), arrays

        # Every n-th row: a part is then spread over the devices as the batch is.
        parts = {name: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1) for name, x in batch.items()}
        zeros = optax.tree.zeros_like(optax.tree.cast(state.params, jnp.float32))
        zeros = jax.lax.with_sharding_constraint(zeros, parameter_shardings(mesh, state.params))
        (loss, grads), arrays = jax.lax.scan(add, (jnp.zeros(()), zeros), parts)

        def joined(name: str, x: jax.Array) -> jax.Array:
            return x.swapaxes(0, 1).reshape(-1, *x.shape[2:]) if name.endswith("_BS") else x.sum(axis=0)

        return (loss, {name: joined(name, x) for name, x in arrays.items()}), grads

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        (loss, arrays), grads = gradients(state, batch)
        updates, opt_state = optimizer.transform.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # Pinned, so that the compiler cannot hand back another layout than it was given.
        params = jax.lax.with_sharding_constraint(params, parameter_shardings(mesh, params))
        opt_state = jax.lax.with_sharding_constraint(opt_state, _opt_shardings(opt_state, params, optimizer, mesh))
        own = {
            "loss": loss,
            "grad_norm": optax.tree.norm(optax.tree.cast(grads, jnp.float32)),
            "lr": optimizer.schedule(state.step),
        }
        metrics = own | objective.metrics(batch, arrays)
        return dataclasses.replace(state, params=params, opt_state=opt_state, step=state.step + 1), metrics

    return jax.jit(step, donate_argnums=0)
