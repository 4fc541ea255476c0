"""Per-token log-probabilities of a packed batch and the SFT loss over them."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from north_jax.parallel import to_natural, to_zigzag
from north_jax.train import head
from north_jax.train.expert_load import load_metrics

Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]


class Objective(NamedTuple):
    """What a train step lowers.

    loss(model, batch, whole) -> (loss, arrays): the part of the whole batch's loss that belongs to the rows of `batch`,
    so that the parts add up, and arrays without gradient: [B, S] of these rows under a name that ends in _BS, and sums
    over them under any other. metrics(whole, arrays) -> scalars of the step, and arrays to be kept, from the arrays of
    all rows.
    """

    loss: Callable[[nnx.Module, Batch, Batch], tuple[jax.Array, Metrics]]
    metrics: Callable[[Batch, Metrics], Metrics] = lambda whole, arrays: {}


def token_logprobs(
    model,
    ids_BS: jax.Array,
    segment_ids_BS: jax.Array,
    positions_BS: jax.Array,
    temperature: float = 1.0,
    *,
    with_entropy: bool = False,
    with_counts: bool = False,
):
    """log p(ids[s] | ids[<s] of the same segment) under softmax(logits / temperature), float32, aligned to token s.

    Returns logp_BS; with `with_entropy` or `with_counts` a tuple (logp_BS[, entropy_BS][, counts_LE]): the entropy in
    nats of the distribution token s was drawn from, carrying no gradient, and the experts' counts of
    `Decoder.hidden`. The first two are exactly 0, with zero gradient, at the first token of a segment and at padding
    (segment 0).
    """
    found = model.hidden(ids_BS, positions_BS=positions_BS, segment_ids_BS=segment_ids_BS, with_counts=with_counts)
    x_BSD, *counts = found if with_counts else (found,)

    # Place s predicts token s + 1; the last place predicts nothing, which `predicted_BS` takes out again.
    values = head.token_logprobs(
        x_BSD,
        model.embedding_VD[...],
        to_zigzag(jnp.roll(ids_BS, -1, axis=1)),
        scale=model.config.logit_scale / temperature,
        with_entropy=with_entropy,
    )
    predicted_BS = (segment_ids_BS[:, 1:] == segment_ids_BS[:, :-1]) & (segment_ids_BS[:, 1:] > 0)
    logp_BS, _, *entropy = (to_natural(value_BS) for value_BS in values)
    aligned = [
        jnp.pad(jnp.where(predicted_BS, value_BS[:, :-1], 0.0), ((0, 0), (1, 0))) for value_BS in (logp_BS, *entropy)
    ]
    values = *aligned, *counts
    return values if len(values) > 1 else values[0]


def sft_loss(model, batch: dict[str, jax.Array], whole: dict[str, jax.Array]) -> tuple[jax.Array, dict]:
    """The batch's share of the weighted mean over the whole one, sum(w * -logp) / sum(whole w).

    `batch` holds ids_BS, segment_ids_BS, positions_BS, weights_BS as `north_jax.data` makes them, some or all rows of
    the `whole` one. A batch without any weight has loss 0.
    """
    logp_BS, counts_LE = token_logprobs(
        model, batch["ids_BS"], batch["segment_ids_BS"], batch["positions_BS"], with_counts=True
    )
    weight = whole["weights_BS"].sum()
    return -(batch["weights_BS"] * logp_BS).sum() / jnp.where(weight > 0, weight, 1.0), {"counts_LE": counts_LE}


def sft_metrics(batch: dict[str, jax.Array], arrays: dict) -> dict[str, jax.Array]:
    """The metrics of a step on this batch."""
    tokens = (batch["segment_ids_BS"] > 0).sum()
    return {
        "tokens": tokens,
        "loss_tokens": (batch["weights_BS"] > 0).sum(),
        "fill": tokens / batch["ids_BS"].size,
        **load_metrics(arrays["counts_LE"]),
    }


SFT = Objective(sft_loss, sft_metrics)
