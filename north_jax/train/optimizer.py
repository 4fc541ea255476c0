"""AdamW and Muon, their learning-rate schedule, and the precision that parameters and moments are kept in.

Bytes per parameter for a matrix whose last axis divides into blocks of 128. Vectors, embedding and router have AdamW's
moments under Muon too; gradients come on top, in the parameters' type.

    optimizer  moments   param_dtype  parameters  moments  together
    adamw      float32   float32      4           8        12
    adamw      bfloat16  float32      4           4        8
    adamw      int8      float32      4           2.0625   6.0625
    adamw      float32   bfloat16     2           8        10
    adamw      bfloat16  bfloat16     2           4        6
    adamw      int8      bfloat16     2           2.0625   4.0625
    muon       float32   float32      4           4        8
    muon       bfloat16  float32      4           2        6
    muon       int8      float32      4           1.03125  5.03125
    muon       float32   bfloat16     2           4        6
    muon       bfloat16  bfloat16     2           2        4
    muon       int8      bfloat16     2           1.03125  3.03125
"""

import functools
import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey, keystr, tree_map_with_path
from optax.contrib import MuonDimensionNumbers

CHOICES = {
    "optimizer": ("adamw", "muon"),
    "moments": ("float32", "bfloat16", "int8"),
    "param_dtype": ("float32", "bfloat16"),
    "rounding": ("nearest", "stochastic"),
    "compute_dtype": ("same", "bfloat16"),
}

# What a run's config says of its optimizer; `optimizer_of` makes it.
SETTINGS = {
    "optimizer": "adamw",
    "moments": "float32",
    "param_dtype": "float32",
    "rounding": "nearest",
    "compute_dtype": "same",
    "weight_decay": 0.01,
    "clip": 1.0,
}

# What Muon makes orthogonal: parameter -> (axes summed over, axes of the result), as its name counts them; any other
# axis, that of stacked layers too, counts matrices.
_MATRICES = {
    "q_DHK": (0, (1, 2)),
    "k_DGK": (0, (1, 2)),
    "v_DGK": (0, (1, 2)),
    "o_HKD": ((0, 1), 2),
    "gate_DF": (0, 1),
    "up_DF": (0, 1),
    "down_FD": (0, 1),
    "gate_EDF": (1, 2),
    "up_EDF": (1, 2),
    "down_EFD": (1, 2),
}
# What it leaves to AdamW: a row of the embedding, an expert's column of the router and a norm's scale act alone.
_NO_MATRICES = ("embedding_VD", "router_DE", "scale_D")

_BLOCK = 128  # values along the last axis that share one scale


class Optimizer(NamedTuple):
    """An optax transformation, the schedule inside it (step -> learning rate), and the types that go with it: that of
    the parameters, and that of the forward and backward pass or "same"."""

    transform: optax.GradientTransformation
    schedule: optax.Schedule
    param_dtype: str
    compute_dtype: str = "same"


class Quantised(NamedTuple):
    """A moment in 8 bits: `values` in the parameter's shape, one float32 of `scales` per block of the last axis."""

    values: jax.Array
    scales: jax.Array


class Keyed(NamedTuple):
    """The state of an optimizer that rounds at random, and the key that the next step draws from."""

    inner: Any
    key: jax.Array


def make_schedule(peak: float, steps: int, *, warmup: int = 0, decay: str = "linear") -> optax.Schedule:
    """Linear rise from peak / (warmup + 1) over `warmup` steps, then to 0 at `steps` (linear, cosine) or constant.

    The rise starts above 0 so that no step is without effect. Raises ValueError for an unknown decay and when the
    warm-up does not end before the last step.
    """
    if decay not in ("linear", "cosine", "constant"):
        raise ValueError(f"unknown learning-rate decay {decay!r}: use linear, cosine or constant")
    if decay != "constant" and not 0 <= warmup < steps:
        raise ValueError(f"a warm-up of {warmup} steps does not end within {steps} steps: lower warmup or raise steps")

    def schedule(step):
        step = jnp.asarray(step, jnp.float32)
        rise = jnp.minimum(1.0, (step + 1) / (warmup + 1))
        if decay == "constant":
            return peak * rise
        left = jnp.clip((steps - step) / (steps - warmup), 0.0, 1.0)
        return peak * jnp.minimum(rise, left if decay == "linear" else (1 - jnp.cos(jnp.pi * left)) / 2)

    return schedule


def is_decayed(path: tuple, leaf) -> bool:
    """Whether weight decay applies to a parameter: to every matrix, not to norms and other vectors."""
    return leaf.ndim > 1 and "norm" not in keystr(path)


def make_optimizer(
    schedule: optax.Schedule,
    *,
    optimizer: str = "adamw",
    moments: str = "float32",
    param_dtype: str = "float32",
    rounding: str = "nearest",
    compute_dtype: str = "same",
    weight_decay: float = 0.01,
    clip: float = 1.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    seed: int = 0,
) -> Optimizer:
    """The optimizer of these choices, after clipping the gradient to global norm `clip`; decay on matrices only.

    optimizer: "adamw"; or "muon", which makes the momentum of every matrix orthogonal (each expert, and the heads of a
    projection together), times 0.2 sqrt(max(rows, columns)) so that AdamW's learning rates suit it (arXiv 2502.16982),
    and gives embedding, router and norms to optax's AdamW with Nesterov momentum.

    moments: the type they are stored in; all arithmetic is float32. "bfloat16" rounds to nearest: a step moves a moment
    by 1 - b1 or 1 - b2 (5 % or more) of its way, which 8 significant bits resolve. "int8" is `quantise`.

    param_dtype: the type of parameters, and so of the forward and backward pass, unless compute_dtype says "bfloat16":
    the step then rounds float32 parameters for them, before it gathers any from other devices.

    rounding: how the sum of a bfloat16 parameter and its float32 update is rounded. To nearest, updates below half a
    unit in the last place (2^-9 of the parameter) are lost; "stochastic" keeps them on average.

    All that is drawn follows from `seed`, the step and the parameter: the key is part of the optimizer state. Raises
    ValueError for an unknown choice, and for stochastic rounding of float32 parameters.
    """
    chosen = {"optimizer": optimizer, "moments": moments, "param_dtype": param_dtype, "rounding": rounding}
    chosen["compute_dtype"] = compute_dtype
    for name, value in chosen.items():
        if value not in CHOICES[name]:
            raise ValueError(f"unknown {name} {value!r}: use {' or '.join(CHOICES[name])}")
    if rounding == "stochastic" and param_dtype != "bfloat16":
        raise ValueError(
            f"rounding 'stochastic' needs param_dtype 'bfloat16', not {param_dtype!r}: float32 parameters take their "
            "updates as they are"
        )

    def decayed(params):
        return tree_map_with_path(is_decayed, params)

    if optimizer == "adamw":
        steps = [optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decayed)]
    else:
        steps = [
            # At rate -1 the plain direction: decay and schedule are then the same for both of its groups.
            optax.contrib.muon(
                -1.0,
                eps=eps,
                adam_b1=b1,
                adam_b2=b2,
                muon_weight_dimension_numbers=_dimension_numbers,
                consistent_rms=0.2,
            ),
            optax.add_decayed_weights(weight_decay, decayed),
            optax.scale_by_learning_rate(schedule),
        ]
    transform = optax.chain(optax.clip_by_global_norm(clip), *steps)
    return Optimizer(_stored(transform, moments, rounding, seed), schedule, param_dtype, compute_dtype)


def optimizer_of(config: Mapping[str, Any], schedule: optax.Schedule, *, seed: int) -> Optimizer:
    """`make_optimizer` with the SETTINGS of a run's config."""
    return make_optimizer(schedule, **{name: config[name] for name in SETTINGS}, seed=seed)


def random_bits(key: jax.Array, name: str, shape: tuple[int, ...]) -> jax.Array:
    """32 random bits an element, uint32, that follow from the key, the name and the element's place.

    murmur3's finaliser over the places, keyed and taken twice: enough to round by, the same on every device layout,
    and one fusion with what rounds. XLA compiles `jax.random.bits` for 0.7 s on a CPU, for every parameter.
    """
    strides = [math.prod(shape[axis + 1 :]) % 2**32 for axis in range(len(shape))]
    iotas = [jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(len(shape))]
    bits = sum((i * jnp.uint32(stride) for i, stride in zip(iotas, strides, strict=True)), jnp.zeros(shape, jnp.uint32))
    for word in jax.random.key_data(key) + jnp.uint32(zlib.crc32(name.encode())):
        bits = bits ^ word
        bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
        bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
        bits = bits ^ (bits >> 16)
    return bits


def stochastic_round(x: jax.Array, bits: jax.Array) -> jax.Array:
    """float32 -> one of the two bfloat16 beside each value, the nearer the likelier: over `random_bits` the mean is x.

    Adds 16 random bits below bfloat16's last and cuts there. What bfloat16 holds exactly stays, as do inf and nan.
    """
    sum_ = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits >> 16)
    cut = jax.lax.bitcast_convert_type(sum_ & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)


def quantise(x: jax.Array, bits: jax.Array, *, signed: bool) -> Quantised:
    """float32 -> 8 bits a value, level n standing for scale (n / 127)² with its sign, or scale (n / 255)⁴ unsigned.

    The scale is the largest magnitude of a block of 128 along the last axis, or of a whole row where that does not
    divide. The levels lie closer towards 0, as the moments of one row span decades. By `random_bits` a value becomes
    one of the two levels beside it so that the mean is the value: to nearest, a moving average would stop short of
    where it belongs. Unsigned values do not become 0 unless their block is, as a step divides by their square root.
    """
    size = _BLOCK if x.shape[-1] % _BLOCK == 0 else x.shape[-1]
    blocks = x.reshape(*x.shape[:-1], -1, size)
    scales = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    top, power = (127, 2) if signed else (255, 4)
    share = jnp.abs(blocks) / jnp.where(scales > 0, scales, 1.0)
    root = jnp.sqrt(share) if signed else jnp.sqrt(jnp.sqrt(share))
    low = jnp.clip(jnp.floor(root * top), 0, top - 1)
    below, above = (low / top) ** power, ((low + 1) / top) ** power
    uniform = (bits >> 8).reshape(blocks.shape) * 2.0**-24
    level = low + (uniform * (above - below) < share - below)
    level = jnp.sign(blocks) * level if signed else jnp.where(scales > 0, jnp.maximum(level, 1), 0)
    return Quantised(level.astype(jnp.int8 if signed else jnp.uint8).reshape(x.shape), scales[..., 0])


def dequantise(moment: Quantised) -> jax.Array:
    """The float32 values that `quantise` stored."""
    values, scales = moment
    level = values.astype(jnp.float32).reshape(*scales.shape, -1)
    share = jnp.sign(level) * (level / 127) ** 2 if values.dtype == jnp.int8 else (level / 255) ** 4
    return (share * scales[..., None]).reshape(values.shape)


def _dimension_numbers(params):
    def one(path, leaf):
        names = {str(getattr(key, "key", "")) for key in path}
        for name in names & _MATRICES.keys():
            stacked = leaf.ndim - len(name.rpartition("_")[2])
            axes = jax.tree.map(stacked.__add__, _MATRICES[name])
            return MuonDimensionNumbers(*axes)
        if names.isdisjoint(_NO_MATRICES):
            raise ValueError(f"Muon does not know the axes of parameter {keystr(path)}: add it to _MATRICES")
        return None

    return tree_map_with_path(one, params)


def _stored(transform: optax.GradientTransformation, moments: str, rounding: str, seed: int):
    """`transform` computing in float32, its moments stored as `moments`, its updates fit for `rounding`."""
    draws = moments == "int8" or rounding == "stochastic"

    def init(params):
        state = _pack(transform.init(optax.tree.cast(params, jnp.float32)), moments, None)
        return Keyed(state, jax.random.key(seed)) if draws else state

    def update(grads, state, params):
        key = next_key = None
        if draws:
            state, (key, next_key) = state.inner, jax.random.split(state.key)
        grads, params = optax.tree.cast((grads, params), jnp.float32)
        updates, state = transform.update(grads, _unpack(state), params)
        if rounding == "stochastic":
            updates = tree_map_with_path(
                # The way to the rounded value: added to the parameter it arrives there exactly.
                lambda path, p, u: stochastic_round(p + u, random_bits(key, keystr(path), p.shape)).astype(p.dtype) - p,
                params,
                updates,
            )
        state = _pack(state, moments, key)
        return updates, Keyed(state, next_key) if draws else state

    return optax.GradientTransformation(init, update)


def _pack(state, moments: str, key: jax.Array | None):
    # In optax's states the first moments are called mu and the second nu. Without a key: zeros, as they begin.
    def one(path, leaf):
        first, second = (GetAttrKey(name) in path for name in ("mu", "nu"))
        if moments == "float32" or not (first or second):
            return leaf
        if moments == "bfloat16":
            return leaf.astype(jnp.bfloat16)
        if key is None:
            shapes = jax.eval_shape(functools.partial(quantise, signed=first), leaf, leaf.astype(jnp.uint32))
            return jax.tree.map(jnp.zeros_like, shapes)
        return quantise(leaf, random_bits(key, keystr(path), leaf.shape), signed=first)

    return tree_map_with_path(one, state)


def _unpack(state):
    def one(leaf):
        if isinstance(leaf, Quantised):
            return dequantise(leaf)
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    return jax.tree.map(one, state, is_leaf=lambda leaf: isinstance(leaf, Quantised))
