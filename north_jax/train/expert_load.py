"""How evenly the routers load the experts: numbers for the metrics file, and a sentence where it goes wrong.

Without a loss that balances them, routers can slide to where all tokens choose the same few experts: the others learn
nothing, and on a mesh all devices wait for those of the few. A busy expert is no sign of it: in the demo's model two
thirds of the tokens choose one. The entropy of the shares is: exp(entropy) is E where the load is even, n where n
experts share it, and C, the experts of one token, where all tokens choose the same.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from north_jax.model.config import ModelConfig

# A layer has collapsed where it uses fewer than C (E / C)^COLLAPSED experts (16 of 128 in the released model, 2.8 of 8
# in the demo's; an untrained one there begins at 4) ...
COLLAPSED = 0.25
# ... in so many steps in a row, each of at least so many tokens to an expert on average: fewer are uneven by chance.
STEPS, ENOUGH = 10, 8


def load_metrics(counts_LE: jax.Array) -> dict[str, jax.Array]:
    """The metrics expert_load_max, _load_entropy, _dead_share, _used_min and _used_layer of `train/metrics.py`.

    counts_LE as from `Decoder.hidden`. Layers without any pair, such as dense ones, are left out; without others the
    load counts as even.
    """
    E = counts_LE.shape[1]
    total_L = jnp.sum(counts_LE, axis=1, dtype=jnp.float32)
    loaded_L = total_L > 0
    share_LE = jnp.where(loaded_L[:, None], counts_LE / jnp.where(loaded_L, total_L, 1.0)[:, None], 1 / E)
    entropy_L = -jnp.sum(share_LE * jnp.log(jnp.where(share_LE > 0, share_LE, 1.0)), axis=1)
    layers = jnp.maximum(jnp.sum(loaded_L), 1)
    return {
        "expert_load_max": jnp.max(share_LE) * E,
        "expert_load_entropy": 1 - jnp.sum(1 - entropy_L / np.log(max(E, 2)), where=loaded_L) / layers,
        "expert_dead_share": jnp.sum(share_LE == 0) / (layers * E),
        "expert_used_min": jnp.exp(jnp.min(entropy_L)),
        "expert_used_layer": jnp.argmin(entropy_L),
    }


class LoadAlarm:
    """Says it once of every stretch of steps in which a layer has collapsed; never stops a run."""

    def __init__(self, config: ModelConfig):
        self.E, self.C, self.steps = config.num_experts, config.num_experts_per_tok, 0

    def __call__(self, step: int, values: Mapping[str, float]) -> str | None:
        """The sentence to print after a step with these metrics, or None."""
        used = values["expert_used_min"]
        enough = values["tokens"] * self.C >= ENOUGH * self.E
        self.steps = self.steps + 1 if enough and used < self.C * (self.E / self.C) ** COLLAPSED else 0
        if self.steps != STEPS:
            return None
        return (
            f"warning: expert load has collapsed for {STEPS} steps: at step {step} the tokens use {used:.1f} of the"
            f" {self.E} experts of layer {values['expert_used_layer']:.0f} (each token {self.C}); look at"
            " expert_used_min and expert_dead_share in metrics.jsonl since when, then at lr and at whether the data"
            " are all alike"
        )
