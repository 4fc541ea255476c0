"""Per-token log-probabilities of a packed batch and the SFT loss over them."""

import jax
import jax.numpy as jnp

from north_jax.parallel import to_natural, to_zigzag
from pallas_kernels import loss_head


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

    # Place s predicts token s + 1; the last place predicts nothing, which `predicted_BS` takes out again. The
    # kernels are for one device; over a mesh the compiler splits XLA's products.
    values = loss_head.token_logprobs(
        x_BSD,
        model.embedding_VD[...],
        to_zigzag(jnp.roll(ids_BS, -1, axis=1)),
        scale=model.config.logit_scale / temperature,
        with_entropy=with_entropy,
        backend="auto" if jax.sharding.get_abstract_mesh().size <= 1 else "xla",
    )
    predicted_BS = (segment_ids_BS[:, 1:] == segment_ids_BS[:, :-1]) & (segment_ids_BS[:, 1:] > 0)
    logp_BS, _, *entropy = (to_natural(value_BS) for value_BS in values)
    aligned = [
        jnp.pad(jnp.where(predicted_BS, value_BS[:, :-1], 0.0), ((0, 0), (1, 0))) for value_BS in (logp_BS, *entropy)
    ]
    return tuple(aligned) if with_entropy else aligned[0]


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
