"""The public function: it checks its arguments, then calls one backend by name."""

import jax
import jax.numpy as jnp

from pallas_kernels.loss_head import auto, reference, tpu, xla

BACKENDS = {"reference": reference, "xla": xla, "tpu": tpu, "auto": auto}


def token_logprobs(
    x_BSD: jax.Array,
    w_VD: jax.Array,
    target_BS: jax.Array,
    *,
    scale: float = 1.0,
    with_entropy: bool = False,
    backend: str,
) -> tuple[jax.Array, ...]:
    """(logp_BS, lse_BS) of every target under softmax(logits), logits = scale x wᵀ, and `with_entropy` the entropy_BS.

    logp = logits[target] - lse, lse = log Σ_v exp(logits[v]), entropy = lse - Σ_v p_v logits[v] in nats; all float32.
    `x` may be [N, D] and the targets [N]; targets lie in 0 … V - 1. Differentiable in x and w; the entropy carries no
    gradient. A Python number scales the logits: the model's factor divided by the temperature, for one.

    No backend but "reference" ever holds [B, S, V]. `backend` is "xla" (chunks of 128 places of every row), "tpu" (our
    kernels, for one device; bfloat16 or float32, D a multiple of 128), "auto" (those where the program is compiled for
    a TPU, else "xla") or "reference". Raises ValueError on an unknown backend, on shapes or types that do not fit, and
    on what the backend does not take.
    """
    if backend not in BACKENDS:
        raise ValueError(f"token_logprobs: backend {backend!r} is not known; choose one of {sorted(BACKENDS)}")
    if x_BSD.ndim not in (2, 3) or x_BSD.shape[:-1] != target_BS.shape or w_VD.shape[1:] != x_BSD.shape[-1:]:
        raise ValueError(
            f"token_logprobs: x {x_BSD.shape}, w {w_VD.shape} and targets {target_BS.shape} do not fit;"
            " pass [B, S, D] or [N, D], [V, D], and [B, S] or [N]"
        )
    if not jnp.issubdtype(target_BS.dtype, jnp.integer):
        raise ValueError(f"token_logprobs: targets are {target_BS.dtype}; pass rows of w, int32")
    call = BACKENDS[backend].token_logprobs
    if x_BSD.ndim == 3:
        return call(x_BSD, w_VD, target_BS, scale, with_entropy)
    return tuple(value[0] for value in call(x_BSD[None], w_VD, target_BS[None], scale, with_entropy))
