"""Per-token log-probabilities of a packed batch and the SFT loss over them."""

import jax
import jax.numpy as jnp

# Places of a row whose logits exist at one time. The backward pass computes them again: whole, they would be the
# largest array of a step, and on a CPU it costs more to write and read them than to compute them twice.
_CHUNK = 128


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

    def head(x_BSD, target_BS):
        logits_BSV = model.logits(x_BSD).astype(jnp.float32) / temperature
        log_z_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
        logp_BS = jnp.take_along_axis(logits_BSV, target_BS[:, :, None], axis=-1)[:, :, 0] - log_z_BS
        if not with_entropy:
            return (logp_BS,)
        logits_BSV, log_z_BS = jax.lax.stop_gradient((logits_BSV, log_z_BS))
        return logp_BS, log_z_BS - (jnp.exp(logits_BSV - log_z_BS[:, :, None]) * logits_BSV).sum(-1)

    # Place s predicts token s + 1; the last place predicts nothing, which `predicted_BS` takes out again.
    values = _over_chunks(head, x_BSD, jnp.roll(ids_BS, -1, axis=1))
    predicted_BS = (segment_ids_BS[:, 1:] == segment_ids_BS[:, :-1]) & (segment_ids_BS[:, 1:] > 0)
    aligned = [jnp.pad(jnp.where(predicted_BS, value_BS[:, :-1], 0.0), ((0, 0), (1, 0))) for value_BS in values]
    return tuple(aligned) if with_entropy else aligned[0]


def _over_chunks(head, x_BSD: jax.Array, target_BS: jax.Array) -> list[jax.Array]:
    # head(x, target) of the row's chunks, one after the other, put together again.
    B, S, D = x_BSD.shape
    size = min(_CHUNK, S)
    count = -(-S // size)
    rest = count * size - S
    x_nBSD = jnp.pad(x_BSD, ((0, 0), (0, rest), (0, 0))).reshape(B, count, size, D).swapaxes(0, 1)
    target_nBS = jnp.pad(target_BS, ((0, 0), (0, rest))).reshape(B, count, size).swapaxes(0, 1)
    values = jax.lax.map(jax.checkpoint(lambda chunk: head(*chunk)), (x_nBSD, target_nBS))
    return [value_nBS.swapaxes(0, 1).reshape(B, count * size)[:, :S] for value_nBS in values]


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
