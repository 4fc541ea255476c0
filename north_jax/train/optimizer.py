"""AdamW with gradient clipping, and its learning-rate schedule."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class Optimizer(NamedTuple):
    """An optax transformation and the schedule inside it (step -> learning rate), which the train step reports."""

    transform: optax.GradientTransformation
    schedule: optax.Schedule


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
    return leaf.ndim > 1 and "norm" not in jax.tree_util.keystr(path)


def adamw(
    schedule: optax.Schedule,
    *,
    weight_decay: float = 0.01,
    clip: float = 1.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
) -> Optimizer:
    """AdamW after clipping the gradient to global norm `clip`; decoupled decay on matrices only."""
    transform = optax.chain(
        optax.clip_by_global_norm(clip),
        optax.adamw(
            schedule,
            b1=b1,
            b2=b2,
            eps=eps,
            weight_decay=weight_decay,
            mask=lambda params: jax.tree_util.tree_map_with_path(is_decayed, params),
        ),
    )
    return Optimizer(transform, schedule)
