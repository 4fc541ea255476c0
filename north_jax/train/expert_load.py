"""How evenly the routers load the experts: numbers for the metrics file, and a sentence where it goes wrong.

Both take counts_LE, the pairs of each expert in each mixture layer, stacked from `north_jax.model.moe.expert_counts`.
"""

import jax
import jax.numpy as jnp
import numpy as np

# A layer alarms where one expert is chosen by more than this share of its tokens (the even share is C / E, an eighth of
# it in the released model) ...
MOST_TOKENS = 0.5
# ... or where more than this share of its experts has no token at all, of enough to give each this many by chance.
MOST_DEAD, ENOUGH = 0.1, 32


def load_metrics(counts_LE: jax.Array) -> dict[str, jax.Array]:
    """The metrics expert_load_max, expert_load_entropy and expert_dead_share, as `train/metrics.py` defines them.

    A layer without any pair counts as even.
    """
    total_L1 = jnp.sum(counts_LE, axis=1, keepdims=True, dtype=jnp.float32)
    E = counts_LE.shape[1]
    share_LE = jnp.where(total_L1 > 0, counts_LE / jnp.where(total_L1 > 0, total_L1, 1.0), 1 / E)
    log_LE = jnp.log(jnp.where(share_LE > 0, share_LE, 1.0))
    return {
        "expert_load_max": jnp.max(share_LE) * E,
        "expert_load_entropy": jnp.mean(-jnp.sum(share_LE * log_LE, axis=1)) / np.log(E),
        "expert_dead_share": jnp.mean(share_LE == 0, dtype=jnp.float32),
    }


def load_alarm(counts_LE, chosen: int, first_layer: int = 0) -> str | None:
    """One sentence that names the worst layers, or None. On the host, from numbers that are there.

    `chosen` is C, the experts a token chooses; `first_layer` is the number of the first mixture layer.
    """
    counts_LE = np.asarray(counts_LE, np.int64)
    tokens_L = np.maximum(counts_LE.sum(axis=1) / chosen, 1)
    share_LE, dead_L = counts_LE / tokens_L[:, None], np.mean(counts_LE == 0, axis=1)
    found = []
    layer, expert = np.unravel_index(np.argmax(share_LE), share_LE.shape)
    if share_LE[layer, expert] > MOST_TOKENS:
        layers = np.sum(np.any(share_LE > MOST_TOKENS, axis=1))
        found.append(
            f"expert {expert} of layer {first_layer + layer} is chosen by {share_LE[layer, expert]:.0%} of the tokens"
            f" (even: {chosen / counts_LE.shape[1]:.1%}; layers with such an expert: {layers})"
        )
    dead_L = np.where(counts_LE.mean(axis=1) >= ENOUGH, dead_L, 0)
    layer = np.argmax(dead_L)
    if dead_L[layer] > MOST_DEAD:
        layers = np.sum(dead_L > MOST_DEAD)
        found.append(
            f"{dead_L[layer]:.0%} of the experts of layer {first_layer + layer} have no token"
            f" (layers with more than {MOST_DEAD:.0%} such: {layers})"
        )
    return f"expert load: {'; '.join(found)}; lower the learning rate, or look at the data" if found else None
