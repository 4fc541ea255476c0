"""What a sampling server answers, read with suspicion: nothing short, contradictory or not a number gets through."""

import base64
import binascii
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# Rounding may lift a certain token's log-probability a little above 0.
LOGPROB_MAX = 1e-3
BUSY_STATUS = (429, 503)
Spans = list[tuple[int, int, str]]


class SamplerError(RuntimeError):
    """The server refused a request, or its answer cannot be trusted; one sentence says which."""


class SamplerUnavailable(SamplerError):
    """The server could not be reached, or did not answer, before the deadline."""


class Lost(SamplerError):
    """One attempt came to nothing and no part of it was used: another may be made."""


class Busy(Lost):
    """The server is well but does not take this attempt now: its queue is full, it starts, or the id is at work."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """One completion: per token its id, its log-probability when drawn, and the weight version that drew it.

    `versions` are (start, end, version), half-open, covering all tokens in order. `finish_reason` is "stop", "length"
    or "abort"; an aborted one has the tokens drawn so far, perhaps none. `cached_tokens` of the prompt were not
    computed again. `experts` is int32 [prompt + completion - 1, layers, top_k], the experts that each token but the
    last was routed to (zeros in dense layers), where the client asks for them; None when aborted before its end.
    """

    ids: list[int]
    logprobs: list[float]
    versions: Spans
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    experts: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Increment:
    """Tokens that a stream has drawn since the last one; `versions` count from this increment's first token.

    SGLang tells versions only at a stream's end: until then they are empty here, and the Generation has them.
    """

    ids: list[int]
    logprobs: list[float]
    versions: Spans


def read_generation(
    answer: Any, *, prompt_tokens: int, max_new_tokens: int, experts: tuple[int, int] | None = None
) -> Generation:
    """The completion in an answer of /generate. Errors: SamplerError naming what is missing, short or contradictory.

    `experts` is (layers, top_k) where routed experts were asked for.
    """
    ids, logprobs, versions = _read_tokens(answer)
    meta = answer["meta_info"]
    try:
        finish = meta["finish_reason"]
        reason, matched = finish["type"], finish.get("matched")
        aborted = reason == "abort"
        # SGLang leaves these two out when it aborts a request that still waits.
        prompt, cached = (
            meta.get("prompt_tokens", prompt_tokens if aborted else None),
            meta.get("cached_tokens", 0 if aborted else None),
        )
        count = meta["completion_tokens"]
    except (KeyError, TypeError, AttributeError) as error:
        raise SamplerError(f"the sampler's answer lacks a field: {error!r}") from None
    if aborted and finish.get("status_code") is not None:
        what = f"the sampler aborted the request with status {finish['status_code']}: {finish.get('message')}"
        raise Busy(what) if finish["status_code"] in BUSY_STATUS else SamplerError(what)
    if reason not in ("stop", "length", "abort"):
        raise SamplerError(f"the finish reason {reason!r} is not known")
    if prompt != prompt_tokens:
        raise SamplerError(f"the sampler counted {prompt} prompt tokens where {prompt_tokens} were sent")
    if not isinstance(cached, int) or not 0 <= cached <= prompt:
        raise SamplerError(f"the sampler says that {cached!r} of {prompt} prompt tokens were cached")
    if count != len(ids):
        raise SamplerError(f"the sampler claims {count} tokens and sent {len(ids)}")
    if len(ids) > max_new_tokens or (reason == "length" and len(ids) < max_new_tokens):
        raise SamplerError(
            f"the sampler ended by {reason!r} after {len(ids)} tokens where {max_new_tokens} were asked for;"
            " is its context shorter than the client's?"
        )
    if reason == "stop" and (not ids or (isinstance(matched, int) and ids[-1] != matched)):
        raise SamplerError(f"the sampler stopped at token {matched}, but its answer ends with {ids[-1:]}")
    routed = None
    if experts is not None and not (aborted and not meta.get("routed_experts")):
        routed = _read_experts(meta.get("routed_experts"), prompt_tokens + len(ids) - 1, experts)
    return Generation(ids, logprobs, versions, reason, prompt, cached, routed)


def read_increment(answer: Any, before: Sequence[int]) -> Increment:
    """What a stream's answer so far has beyond the tokens `before`. Errors: SamplerError when it takes some back."""
    ids, logprobs, versions = _read_tokens(answer, ended=False)
    at = len(before)
    if ids[:at] != list(before):
        raise SamplerError(f"the sampler's stream took back some of its first {at} tokens")
    later = [(max(start, at) - at, end - at, version) for start, end, version in versions if end > at]
    return Increment(ids[at:], logprobs[at:], later)


def _read_tokens(answer: Any, ended: bool = True) -> tuple[list[int], list[float], Spans]:
    try:
        ids, meta = list(answer["output_ids"]), answer["meta_info"]
        # An answer without tokens may come without these two: nothing was drawn, by no version.
        triples = meta["output_token_logprobs"] if ids else meta.get("output_token_logprobs") or []
        spans = meta["weight_versions"] if ids and ended else meta.get("weight_versions") or []
        versions = [(span["start"], span["end"], str(span["version"])) for span in spans]
        named = [triple[1] for triple in triples]
        logprobs = [triple[0] for triple in triples]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise SamplerError(f"the sampler's answer lacks a field: {error!r}") from None
    if named != ids:
        raise SamplerError(f"the sampler's {len(ids)} ids and the {len(named)} of its log-probabilities differ")
    for at, logprob in enumerate(logprobs):
        if not isinstance(logprob, (int, float)) or not math.isfinite(logprob) or logprob > LOGPROB_MAX:
            raise SamplerError(f"log-probability {logprob!r} of output token {at} is not one; are the weights numbers?")
    if not ended and not versions:
        return ids, [float(p) for p in logprobs], []
    edges = [0] + [end for _, end, _ in versions]
    whole = [start for start, *_ in versions] == edges[:-1] and edges == sorted(edges)
    if not whole or edges[-1] != len(ids):
        raise SamplerError(f"the weight versions {versions} do not cover the {len(ids)} output tokens")
    return ids, [float(p) for p in logprobs], [span for span in versions if span[0] < span[1]]


def _read_experts(text: Any, rows: int, shape: tuple[int, int]) -> np.ndarray:
    try:
        values = np.frombuffer(base64.b64decode(text, validate=True), np.int32)
    except (TypeError, ValueError, binascii.Error):
        raise SamplerError(
            f"the routed experts are {str(text)[:40]!r}, not base64 of int32; does the server return them"
            " (SGLang: --enable-return-routed-experts)?"
        ) from None
    if values.size != rows * shape[0] * shape[1] or values.min(initial=0) < 0:
        raise SamplerError(
            f"the routed experts are {values.size} numbers, not {rows} tokens x {shape[0]} layers x {shape[1]} experts"
        )
    return values.reshape(rows, *shape)
