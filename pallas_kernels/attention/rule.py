"""The rule of differentiation that all backends share: what is saved, and which function gives the gradients."""

from collections.abc import Callable

import jax
from jax.ad_checkpoint import checkpoint_name

# What `jax.checkpoint` knows the saved results by: a policy that keeps them does not compute attention twice.
SAVED = "attention_results"


def differentiable(forward: Callable, backward: Callable) -> Callable:
    """(q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS) -> (out_BSHK, lse_BHS), which `forward` computes.

    Saved are arguments and results, so memory is linear in the length; `backward` gets these, then the gradients of
    both results, and gives those of q, k and v.
    """

    @jax.custom_vjp
    def attention(q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS):
        return forward(q_BSHK, k_BTGK, v_BTGK, start_BS, end_BS)

    def save(*arguments):
        results = tuple(checkpoint_name(result, SAVED) for result in forward(*arguments))
        return results, (*arguments, *results)

    attention.defvjp(save, lambda saved, gradients: (*backward(*saved, *gradients), None, None))
    return attention
