"""Sampling parameters in SGLang's spelling, and the function that draws one token per row inside the engine's jit."""

import dataclasses
import math
import secrets
from typing import Any

import jax
import jax.numpy as jnp

MAX_STOP_IDS = 8
MAX_COMPLETIONS = 64

# Fields of SGLang's sampling_params that are accepted only with a value that changes nothing.
_NEUTRAL = {
    "frequency_penalty": (0, 0.0, None),
    "presence_penalty": (0, 0.0, None),
    "repetition_penalty": (1, 1.0, None),
    "min_new_tokens": (0, None),
    "stop": (None, [], ""),
    "stop_regex": (None, [], ""),
    "logit_bias": (None, {}),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "custom_params": (None, {}),
    "skip_special_tokens": (True, False, None),
    "spaces_between_special_tokens": (True, False, None),
    "no_stop_trim": (True, False, None),
    "stream_interval": (None, 1),
}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one completion is drawn. `temperature` 0 is greedy; `seed` fixes the draw whatever else is running.

    Only the `top_k` most likely tokens (0: all), those of at least `min_p` times the likeliest one's probability, and
    the nucleus of `top_p` are drawn.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def from_json(cls, params: Any, where: str = "sampling_params") -> tuple["Sampling", int]:
        """(parameters, number of completions n) from SGLang's `sampling_params` object.

        Errors: ValueError naming the field when it is unknown, of the wrong type or range, or not implemented here.
        Without `sampling_seed` a fresh random seed is drawn. Source: SGLang 0.5.23, sampling_params.
        """
        if not isinstance(params, dict):
            raise ValueError(f"{where} must be a JSON object, not {type(params).__name__}")
        params = dict(params)
        fields: dict[str, Any] = {}
        number = _take(params, "n", where, int, 1, 1, MAX_COMPLETIONS)
        fields["max_new_tokens"] = _take(params, "max_new_tokens", where, int, 128, 1, 1 << 30)
        fields["temperature"] = _take(params, "temperature", where, float, 1.0, 0.0, 1e4)
        fields["top_p"] = _take(params, "top_p", where, float, 1.0, 0.0, 1.0)
        if fields["top_p"] == 0.0:
            raise ValueError(f"{where}.top_p must be above 0; for greedy decoding send temperature 0")
        top_k = _take(params, "top_k", where, int, -1, -1, 1 << 30)
        if top_k == 0:
            raise ValueError(f"{where}.top_k must be at least 1, or -1 for all tokens")
        fields["top_k"] = 0 if top_k in (-1, 1 << 30) else top_k  # SGLang's two ways to say all
        fields["min_p"] = _take(params, "min_p", where, float, 0.0, 0.0, 1.0)
        seed = _take(params, "sampling_seed", where, int, None, -(1 << 63), (1 << 63) - 1)
        fields["seed"] = secrets.randbits(63) if seed is None else seed
        ignore_eos = params.pop("ignore_eos", False)
        if not isinstance(ignore_eos, bool):
            raise ValueError(f"{where}.ignore_eos must be true or false, not {ignore_eos!r}")
        fields["ignore_eos"] = ignore_eos
        stop_ids = params.pop("stop_token_ids", None) or []
        if not isinstance(stop_ids, list) or not all(type(i) is int for i in stop_ids):
            raise ValueError(f"{where}.stop_token_ids must be a list of token ids, not {stop_ids!r}")
        if len(set(stop_ids)) > MAX_STOP_IDS - 1:
            raise ValueError(f"{where}.stop_token_ids has {len(set(stop_ids))} ids; at most {MAX_STOP_IDS - 1} fit")
        fields["stop_token_ids"] = tuple(sorted(set(stop_ids)))
        refuse_unless_neutral(params, _NEUTRAL, f"{where}.")
        return cls(**fields), number


def refuse_unless_neutral(fields: dict[str, Any], neutral: dict[str, tuple], prefix: str = "") -> None:
    """Raise ValueError for a field that is unknown, or that asks for anything but one of its `neutral` values."""
    for name, value in fields.items():
        if name not in neutral:
            raise ValueError(f"{prefix}{name} is not a field of this request; remove it")
        if not any(value == allowed and type(value) is type(allowed) for allowed in neutral[name]):
            raise ValueError(f"{prefix}{name}={value!r} is not implemented by this sampler; leave it out")


def _take(params, name, where, kind, default, low, high):
    value = params.pop(name, None)
    if value is None:
        return default
    good = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
    if not good or not low <= value <= high:
        kind_name = "a whole number" if kind is int else "a number"
        raise ValueError(f"{where}.{name} must be {kind_name} from {low} to {high}, not {value!r}")
    return kind(value)


def token_uniforms(seed_B2: jax.Array, index_B: jax.Array) -> jax.Array:
    """One number in [0, 1) per row: the request's seed (two uint32 words, high and low) and the token's index, hashed.

    It depends on nothing else, so a seeded request draws the same numbers alone or among others.
    """
    keys_B = jax.random.wrap_key_data(seed_B2, impl="threefry2x32")
    # The folded key is itself the hash; drawing from it would hash a second time.
    words_B2 = jax.random.key_data(jax.vmap(jax.random.fold_in)(keys_B, index_B))
    return (words_B2[:, 0] >> 8).astype(jnp.float32) * 2.0**-24


def sample(
    logits_BV: jax.Array,
    uniform_B: jax.Array,
    temperature_B: jax.Array,
    top_p_B: jax.Array,
    top_k_B: jax.Array,
    min_p_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(token_B, logprob_B): the draw that `uniform_B` makes from softmax(logits / temperature), truncated.

    To the tokens that are among the `top_k` most likely (0: all), in the nucleus, the smallest set of most likely
    tokens whose mass reaches top_p, and at least min_p times as likely as the likeliest; each of the whole
    distribution, as SGLang does. Tokens tied with the least likely one of a set belong to it. The log-probability is of
    softmax(logits / temperature) before the cut, and at temperature 1 for greedy rows (temperature 0), as SGLang
    reports it. `logits_BV` float32.
    """
    greedy_B = temperature_B == 0.0
    scaled_BV = logits_BV / jnp.where(greedy_B, 1.0, temperature_B)[:, None]
    peak_B1 = jnp.max(scaled_BV, axis=-1, keepdims=True)
    weight_BV = jnp.exp(scaled_BV - peak_B1)
    total_B = jnp.sum(weight_BV, axis=-1)
    truncated = jnp.any((top_p_B < 1.0) | (top_k_B > 0) | (min_p_B > 0.0))
    kept_BV = jax.lax.cond(
        truncated, lambda: _truncate(weight_BV, total_B, top_p_B, top_k_B, min_p_B), lambda: weight_BV
    )
    likeliest_B = jnp.argmax(scaled_BV, axis=-1)
    drawn_B = jax.lax.cond(jnp.all(greedy_B), lambda: likeliest_B, lambda: _inverse_cdf(kept_BV, uniform_B))
    token_B = jnp.where(greedy_B, likeliest_B, drawn_B).astype(jnp.int32)
    chosen_B = jnp.take_along_axis(scaled_BV, token_B[:, None], axis=-1)[:, 0]
    return token_B, chosen_B - peak_B1[:, 0] - jnp.log(total_B)


def _truncate(weight_BV, total_B, top_p_B, top_k_B, min_p_B):
    """Zero the weights that top_k, top_p or min_p leave out. The largest weight is 1."""
    top_k_B = jnp.where(top_k_B > 0, top_k_B, weight_BV.shape[1]).astype(jnp.float32)
    edge_B = jnp.maximum(min_p_B, _edge(weight_BV, jnp.ones_like(weight_BV), top_k_B))
    edge_B = jnp.maximum(edge_B, jnp.where(top_p_B < 1.0, _edge(weight_BV, weight_BV, top_p_B * total_B), 0.0))
    return jnp.where(weight_BV >= edge_B[:, None], weight_BV, 0.0)


def _edge(weight_BV, mass_BV, wanted_B):
    """The largest weight such that the mass of the tokens from it on reaches `wanted_B`, by bisection, not by sorting.

    Non-negative floats order as their bit patterns do, so 31 halvings of the pattern find it exactly.
    """

    def halve(_, bounds):
        low_B, high_B = bounds
        middle_B = low_B + (high_B - low_B) // 2
        bar_B1 = jax.lax.bitcast_convert_type(middle_B, jnp.float32)[:, None]
        enough_B = jnp.sum(jnp.where(weight_BV >= bar_B1, mass_BV, 0.0), axis=-1) >= wanted_B
        return jnp.where(enough_B, middle_B, low_B), jnp.where(enough_B, high_B, middle_B)

    # The largest weight is 1: an edge just above keeps nothing, an edge at 0 keeps all.
    high_B = jnp.full(wanted_B.shape, jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32) + 1)
    edge_B, _ = jax.lax.fori_loop(0, 31, halve, (jnp.zeros_like(high_B), high_B))
    return jax.lax.bitcast_convert_type(edge_B, jnp.float32)


def _inverse_cdf(weight_BV, uniform_B):
    """The token whose interval of cumulated weight holds uniform * total: first the block, then the token in it."""
    rows, vocab = weight_BV.shape
    width = max(1, math.isqrt(vocab))
    blocks = -(-vocab // width)
    weight_BNW = jnp.pad(weight_BV, ((0, 0), (0, blocks * width - vocab))).reshape(rows, blocks, width)

    def locate(part_BX, target_B):
        """Index of the first part with weight that reaches past the target, and the weight before it."""
        # A product with a triangle of ones: a running sum that compiles, and runs, fast everywhere.
        parts = part_BX.shape[-1]
        before_BX = jnp.matmul(part_BX, jnp.triu(jnp.ones((parts, parts), part_BX.dtype), 1), precision="highest")
        # A rounding error must never choose a part of weight 0: the last part with weight takes what is left.
        live_BX = part_BX > 0
        hit_BX = live_BX & (before_BX + part_BX > target_B[:, None])
        last_B = parts - 1 - jnp.argmax(live_BX[:, ::-1], axis=-1)
        index_B = jnp.where(jnp.any(hit_BX, axis=-1), jnp.argmax(hit_BX, axis=-1), last_B)
        return index_B, jnp.take_along_axis(before_BX, index_B[:, None], axis=-1)[:, 0]

    block_BN = jnp.sum(weight_BNW, axis=-1)
    target_B = uniform_B * jnp.sum(block_BN, axis=-1)
    block_B, before_B = locate(block_BN, target_B)
    inside_BW = jnp.take_along_axis(weight_BNW, block_B[:, None, None], axis=1)[:, 0]
    token_B, _ = locate(inside_BW, jnp.maximum(target_B - before_B, 0.0))
    # Only weights that are not numbers can point into the padding; the log-probability then says so.
    return jnp.minimum(block_B * width + token_B, vocab - 1)
