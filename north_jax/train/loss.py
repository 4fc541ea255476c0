"""Per-token log-probabilities of a packed batch and the SFT loss over them."""

import jax
import jax.numpy as jnp


def token_logprobs(
    model,
    ids_BS: jax.Array,
    segment_ids_BS: jax.Array,
    positions_BS: jax.Array,
    temperature: float = 1.0,
    *,
    with_entropy: bool = False,
):
    """log p(ids[s] | ids[<s] of the same segment) under softmax(logits / temperature), float32, aligned to token s.

    Returns logp_BS; with `with_entropy` a pair (logp_BS, entropy_BS), the entropy in nats of the distribution token s
    was drawn from, carrying no gradient. Both are exactly 0, with zero gradient, at the first token of a segment and
    at padding (segment 0).
    """
    x_BSD = model.hidden(ids_BS, positions_BS=positions_BS, segment_ids_BS=segment_ids_BS)
    # Position s predicts token s + 1, so the last position predicts nothing: S = length - 1 from here on.
    logits_BSV = model.logits(x_BSD[:, :-1]).astype(jnp.float32) / temperature
    logits_BSV -= jax.lax.stop_gradient(logits_BSV.max(-1, keepdims=True))
    log_z_BS = jnp.log(jnp.exp(logits_BSV).sum(-1))
    # A masked sum, not a gather: its transpose is elementwise, where a gather's is a slow scatter.
    is_target_BSV = jnp.arange(logits_BSV.shape[-1]) == ids_BS[:, 1:, None]
    logp_BS = jnp.where(is_target_BSV, logits_BSV, 0.0).sum(-1) - log_z_BS

    predicted_BS = (segment_ids_BS[:, 1:] == segment_ids_BS[:, :-1]) & (segment_ids_BS[:, 1:] > 0)

    def align(value_BS):
        return jnp.pad(jnp.where(predicted_BS, value_BS, 0.0), ((0, 0), (1, 0)))

    if not with_entropy:
        return align(logp_BS)
    probs_BSV = jax.lax.stop_gradient(jnp.exp(logits_BSV - log_z_BS[..., None]))
    entropy_BS = jax.lax.stop_gradient(log_z_BS) - (probs_BSV * jax.lax.stop_gradient(logits_BSV)).sum(-1)
    return align(logp_BS), align(entropy_BS)


def sft_loss(model, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Weighted mean over the global batch, sum(w * -logp) / sum(w), and the metrics of the step.

    `batch` holds ids_BS, segment_ids_BS, positions_BS, weights_BS as `north_jax.data` makes them. A batch without any
    weight has loss 0.
    """
    logp_BS = token_logprobs(model, batch["ids_BS"], batch["segment_ids_BS"], batch["positions_BS"])
    weights_BS = batch["weights_BS"]
    weight = weights_BS.sum()
    loss = -(weights_BS * logp_BS).sum() / jnp.where(weight > 0, weight, 1.0)
    tokens = (batch["segment_ids_BS"] > 0).sum()
    return loss, {"tokens": tokens, "loss_tokens": (weights_BS > 0).sum(), "fill": tokens / weights_BS.size}
