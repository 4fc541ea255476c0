"""CISPO, its denominators, and how far the learner's log-probabilities are from those recorded at sampling."""

import jax
import jax.numpy as jnp
import numpy as np

# The ratio is exp(log-ratio) clamped to this range, so that nothing overflows whatever the two sides say.
LOG_RATIO_CLAMP = 20.0

AGGREGATIONS = ("token_mean", "seq_mean_all_rows", "seq_mean_nonempty_rows", "prompt_mean", "const_norm_T")


def cispo(
    logp_BS: jax.Array,
    behaviour_logp_BS: jax.Array,
    advantage: jax.Array,
    mask_BS: jax.Array,
    *,
    ratio_cap: float,
    ratio_floor: float = 0.0,
    denominator: jax.Array | float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """L = -sum mask * sg(clip(r, floor, cap)) * A * logp / max(denominator, 1), r = exp(logp - behaviour_logp).

    logp_BS: log-probabilities under the learner, at the temperature the sampler used. behaviour_logp_BS: those the
    sampler recorded. advantage: [B] per row or [B, S] per token. mask_BS: nonzero on trained tokens; what the other
    arrays hold elsewhere is never read, NaN included. ratio_cap, ratio_floor: absolute bounds on r; floor 0 is none.
    denominator: scalar, or per token and broadcastable to [B, S] (`denominators`); a global count, so that losses of
    micro-batches and shards add up to that of the whole batch.

    The weight carries no gradient: dL/dlogp = -mask * clip(r) * A / denominator. Returns the loss and metrics over the
    masked tokens: tokens, ratio_mean, ratio_max, ratio_min (1 when there are none), clip_high_frac and clip_low_frac
    (share of tokens beyond a bound), clip_high_frac_positive and _negative (that share among tokens with A > 0, A < 0),
    weight_mean (of the clipped ratio). Source: MiniMax-M1, arXiv 2506.13585 eq. 4-5.
    """
    mask_BS = mask_BS.astype(bool)
    logp_BS = jnp.where(mask_BS, logp_BS, 0.0)
    behaviour_logp_BS = jnp.where(mask_BS, behaviour_logp_BS, 0.0)
    advantage_BS = advantage[:, None] if advantage.ndim == 1 else advantage
    advantage_BS = jnp.where(mask_BS, advantage_BS, 0.0)

    ratio_BS = _ratio(jax.lax.stop_gradient(logp_BS), behaviour_logp_BS)
    weight_BS = jnp.clip(ratio_BS, ratio_floor, ratio_cap)
    loss = -(weight_BS * advantage_BS * logp_BS / jnp.maximum(denominator, 1.0)).sum()

    tokens = mask_BS.sum()
    high_BS = mask_BS & (ratio_BS > ratio_cap)
    positive_BS, negative_BS = advantage_BS > 0, advantage_BS < 0
    any_token = tokens > 0
    return loss, {
        "tokens": tokens,
        "ratio_mean": jnp.where(any_token, _mean(ratio_BS, mask_BS), 1.0),
        "ratio_max": jnp.where(any_token, jnp.where(mask_BS, ratio_BS, -jnp.inf).max(), 1.0),
        "ratio_min": jnp.where(any_token, jnp.where(mask_BS, ratio_BS, jnp.inf).min(), 1.0),
        "clip_high_frac": _mean(high_BS, mask_BS),
        "clip_low_frac": _mean(ratio_BS < ratio_floor, mask_BS),
        "clip_high_frac_positive": _mean(high_BS, positive_BS),
        "clip_high_frac_negative": _mean(high_BS, negative_BS),
        "weight_mean": _mean(weight_BS, mask_BS),
    }


def denominators(tokens_N, group_N, aggregation: str = "token_mean", length: int | None = None) -> np.ndarray:
    """What the token losses of each sequence are divided by, float64 [N], for a named aggregation.

    tokens_N: trained tokens of each sequence that counts; group_N: its prompt. Every entry is at least 1.
    token_mean: all trained tokens. seq_mean_all_rows, seq_mean_nonempty_rows: mean over (non-empty) sequences of each
    one's token mean. prompt_mean: mean over prompts of each one's token mean (ScaleRL). const_norm_T: sequences times
    `length`, the number of places in a row (Dr. GRPO, arXiv 2503.20783).
    """
    tokens_N, group_N = np.asarray(tokens_N, np.float64), np.asarray(group_N)
    match aggregation:
        case "token_mean":
            denominator_N = np.full_like(tokens_N, tokens_N.sum())
        case "seq_mean_all_rows":
            denominator_N = tokens_N * len(tokens_N)
        case "seq_mean_nonempty_rows":
            denominator_N = tokens_N * np.count_nonzero(tokens_N)
        case "prompt_mean":
            labels, prompt_N = np.unique(group_N, return_inverse=True)
            tokens_P = np.bincount(prompt_N, weights=tokens_N, minlength=len(labels))
            denominator_N = tokens_P[prompt_N] * np.count_nonzero(tokens_P)
        case "const_norm_T":
            if length is None:
                raise ValueError("aggregation const_norm_T divides by the row length: pass length")
            denominator_N = np.full_like(tokens_N, len(tokens_N) * length)
        case _:
            raise ValueError(f"aggregation {aggregation!r} is unknown: use one of {', '.join(AGGREGATIONS)}")
    return np.maximum(denominator_N, 1.0)


def mismatch_metrics(logp_BS: jax.Array, behaviour_logp_BS: jax.Array, mask_BS: jax.Array) -> dict[str, jax.Array]:
    """How two sides' log-probabilities of the same tokens differ, over the masked ones; r = exp(logp - behaviour_logp).

    k1 = mean(-log r) and k3 = mean(r - 1 - log r), two estimates of KL(behaviour || learner) in nats;
    abs_logp_diff_mean, _max in nats; prob_diff_mean, _max of |p - p_behaviour|; pearson_prob, the correlation of the
    two probabilities (1 where one of them does not vary); chi2 = mean(r^2) - 1; ess_frac = mean(r)^2 / mean(r^2);
    extreme_frac_tau2, the share with r > 2 or r < 1/2; ppl_ratio = exp(k1). Without tokens: those of identical sides.
    """
    mask_BS = mask_BS.astype(bool)
    logp_BS = jnp.where(mask_BS, logp_BS, 0.0)
    behaviour_logp_BS = jnp.where(mask_BS, behaviour_logp_BS, 0.0)
    difference_BS = logp_BS - behaviour_logp_BS
    ratio_BS = _ratio(logp_BS, behaviour_logp_BS)
    p_BS, q_BS = jnp.exp(logp_BS), jnp.exp(behaviour_logp_BS)
    k1 = _mean(-difference_BS, mask_BS)
    square = jnp.where(mask_BS.any(), _mean(ratio_BS**2, mask_BS), 1.0)
    return {
        "k1": k1,
        "k3": _mean(ratio_BS - 1 - difference_BS, mask_BS),
        "abs_logp_diff_mean": _mean(jnp.abs(difference_BS), mask_BS),
        "abs_logp_diff_max": jnp.abs(difference_BS).max(),
        "prob_diff_max": jnp.abs(p_BS - q_BS).max(),
        "prob_diff_mean": _mean(jnp.abs(p_BS - q_BS), mask_BS),
        "pearson_prob": _pearson(p_BS, q_BS, mask_BS),
        "chi2": square - 1,
        "ess_frac": jnp.where(mask_BS.any(), _mean(ratio_BS, mask_BS) ** 2, 1.0) / square,
        "extreme_frac_tau2": _mean((ratio_BS > 2) | (ratio_BS < 0.5), mask_BS),
        "ppl_ratio": jnp.exp(k1),
    }


def mismatch_by_lag(logp_BS, behaviour_logp_BS, mask_BS, lag_BS) -> dict[int, dict[str, float]]:
    """`mismatch_metrics` and the number of tokens for each version lag that occurs among the masked tokens.

    lag_BS: learner steps between the weights that sampled the token and the step that uses it.
    """
    mask_BS, lag_BS = np.asarray(mask_BS, bool), np.asarray(lag_BS)
    result = {}
    for lag in np.unique(lag_BS[mask_BS]).tolist():
        one_BS = mask_BS & (lag_BS == lag)
        metrics = mismatch_metrics(jnp.asarray(logp_BS), jnp.asarray(behaviour_logp_BS), jnp.asarray(one_BS))
        result[lag] = {"tokens": int(one_BS.sum())} | {name: float(value) for name, value in metrics.items()}
    return result


def version_lag(token_version, mask, consumed_at_step: int) -> dict[str, float]:
    """Age in learner steps of the weights that sampled the masked tokens, when used after `consumed_at_step` steps.

    token_version: learner steps done by the weights that sampled each token; weights that a resume has lost may have
    more than `consumed_at_step` and count as lag 0. Returns lag_oldest, lag_newest, lag_token_mean and versions, the
    number of different ones; all 0 without a masked token.
    """
    version_N = np.asarray(token_version)[np.asarray(mask, bool)]
    if not version_N.size:
        return {"lag_oldest": 0, "lag_newest": 0, "lag_token_mean": 0.0, "versions": 0}
    lag_N = np.maximum(consumed_at_step - version_N, 0)
    return {
        "lag_oldest": int(lag_N.max()),
        "lag_newest": int(lag_N.min()),
        "lag_token_mean": float(lag_N.mean()),
        "versions": len(np.unique(version_N)),
    }


def _ratio(logp_BS, behaviour_logp_BS):
    return jnp.exp(jnp.clip(logp_BS - behaviour_logp_BS, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))


def _mean(value_BS, mask_BS):
    """Mean over the masked places, 0 when there are none."""
    return jnp.where(mask_BS, value_BS, 0).sum() / jnp.maximum(mask_BS.sum(), 1)


def _pearson(p_BS, q_BS, mask_BS):
    p_BS = jnp.where(mask_BS, p_BS - _mean(p_BS, mask_BS), 0.0)
    q_BS = jnp.where(mask_BS, q_BS - _mean(q_BS, mask_BS), 0.0)
    scale = jnp.sqrt((p_BS**2).sum()) * jnp.sqrt((q_BS**2).sum())
    return jnp.where(scale > 0, (p_BS * q_BS).sum() / jnp.where(scale > 0, scale, 1.0), 1.0)
