"""Log-probabilities of targets under softmax(scale x wᵀ), without the logits in memory."""

from pallas_kernels.loss_head.api import BACKENDS, token_logprobs

__all__ = ["BACKENDS", "token_logprobs"]
