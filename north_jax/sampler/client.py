"""The client of a sampling server that speaks SGLang's native HTTP interface: ours, or SGLang itself."""

import asyncio
import dataclasses
import json
import math
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import aiohttp

RETRY_FIRST_S = 0.1
RETRY_LONGEST_S = 2.0
# Rounding may lift a certain token's log-probability a little above 0.
LOGPROB_MAX = 1e-3


class SamplerError(RuntimeError):
    """The server refused a request, or its answer cannot be trusted; one sentence says which."""


class SamplerUnavailable(SamplerError):
    """The server could not be reached, or did not answer, before the deadline."""


@dataclasses.dataclass(frozen=True)
class Generation:
    """One completion: per token its id, its log-probability when drawn, and the weight version that drew it.

    `versions` are (start, end, version), half-open, covering all tokens in order. `finish_reason` is "stop", "length"
    or "abort". `cached_tokens` of the prompt were not computed again.
    """

    ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int, str]]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int


class SamplerClient:
    """Asks one server. Every call has a deadline; lost connections are retried under the same request id until then.

    `vocab_size` and `context` (tokens of prompt and completion) are checked before anything is sent: an id outside the
    vocabulary ends an SGLang server.
    """

    def __init__(self, url: str, *, vocab_size: int, context: int, timeout_s: float = 120.0):
        self.url, self.vocab_size, self.context, self.timeout_s = url.rstrip("/"), vocab_size, context, timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "SamplerClient":
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self,
        ids: Sequence[int],
        *,
        temperature: float,
        top_p: float = 1.0,
        max_new_tokens: int,
        stop_ids: Iterable[int] = (),
        seed: int | None = None,
        rid: str | None = None,
        timeout_s: float | None = None,
    ) -> Generation:
        """One completion of the prompt `ids`; with a `seed` it does not depend on what else the server does.

        Errors: ValueError for a prompt that cannot be sent, SamplerError for a refusal or an answer with missing,
        contradictory or not-a-number fields, SamplerUnavailable at the deadline (the request is then aborted).
        """
        ids = [int(i) for i in ids]
        if not ids or len(ids) >= self.context:
            raise ValueError(
                f"a prompt of {len(ids)} tokens does not fit the context of {self.context}; send 1 or more"
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise ValueError(f"the prompt has ids from {min(ids)} to {max(ids)}; the vocabulary has {self.vocab_size}")
        params: dict[str, Any] = {
            "temperature": float(temperature),
            "top_p": float(top_p),
            "max_new_tokens": min(int(max_new_tokens), self.context - len(ids)),
        }
        if stop_ids := [int(i) for i in stop_ids]:
            params["stop_token_ids"] = stop_ids
        if seed is not None:
            params["sampling_seed"] = int(seed)
        rid = rid or uuid.uuid4().hex
        body = {"input_ids": ids, "sampling_params": params, "rid": rid, "return_logprob": True}
        try:
            answer = await self._post("/generate", body, timeout_s)
        except SamplerUnavailable:
            await self._quietly_abort(rid)
            raise
        return _read_generation(answer, len(ids))

    async def update_weights(
        self, path: str, version: str | int, *, flush_cache: bool = True, timeout_s: float | None = None
    ) -> None:
        """Have the server load the checkpoint folder `path` as `version`, and see that it then names this version.

        With `flush_cache` running requests have their keys and values computed again under the new weights.
        """
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": flush_cache}
        answer = await self._post("/update_weights_from_disk", body, timeout_s)
        if answer.get("success") is not True:
            raise SamplerError(f"{self.url} did not take the weights of {path}: {answer.get('message', answer)}")
        serving = (await self.model_info()).get("weight_version")
        if serving != str(version):
            raise SamplerError(f"{self.url} took the weights of {path} but names version {serving!r}, not {version!r}")

    async def pause(self, mode: str) -> None:
        """Stop generating; running requests are aborted ("abort"), requeued ("retract") or frozen ("in_place")."""
        await self._post("/pause_generation", {"mode": mode}, None)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._post("/continue_generation", {}, None)

    async def abort(self, rid: str | None = None) -> None:
        """End the request `rid`, or all; each answers with the tokens it has and finish reason "abort"."""
        await self._post("/abort_request", {"abort_all": True} if rid is None else {"rid": rid}, None)

    async def health(self, timeout_s: float = 5.0) -> bool:
        """Whether the server answers and is ready."""
        try:
            async with asyncio.timeout(timeout_s), self._connected().get(f"{self.url}/ready") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def model_info(self) -> dict[str, Any]:
        """What is served: `weight_version`, `model_path` and more."""
        return await self._ask("GET", "/model_info", None, None)

    async def server_info(self) -> dict[str, Any]:
        """The server's counters."""
        return await self._ask("GET", "/server_info", None, None)

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The sampler queues; a limit here would only hide the queue from it.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    async def _post(self, path: str, body: dict, timeout_s: float | None) -> Any:
        return await self._ask("POST", path, body, timeout_s)

    async def _ask(self, method: str, path: str, body: dict | None, timeout_s: float | None) -> Any:
        """The answer to a request that may be sent again: the same rid and content has one completion."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        wait_s, last = RETRY_FIRST_S, "no answer"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        async with self._connected().request(
                            method, self.url + path, json=body, timeout=aiohttp.ClientTimeout(total=None)
                        ) as response:
                            if response.status != 503:
                                return await self._read(path, response)
                            last = _message(await response.text())
                    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
                        last = f"{type(error).__name__}: {error}"
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, RETRY_LONGEST_S)
        except TimeoutError:
            raise SamplerUnavailable(f"{self.url}{path} gave no answer within {timeout_s:g} s ({last})") from None

    async def _read(self, path: str, response: aiohttp.ClientResponse) -> Any:
        if response.status != 200:
            raise SamplerError(f"{self.url}{path} answered {response.status}: {_message(await response.text())}")
        if response.content_type != "application/json":
            return await response.text()
        try:
            return await response.json()
        except ValueError as error:
            raise SamplerError(f"{self.url}{path} answered with broken JSON: {error}") from None

    async def _quietly_abort(self, rid: str) -> None:
        try:
            async with (
                asyncio.timeout(2.0),
                self._connected().post(f"{self.url}/abort_request", json={"rid": rid}),
            ):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass  # the server is gone, and the request with it


def _message(text: str) -> str:
    """The sentence in an error answer, whichever of the server's forms it has."""
    try:
        answer = json.loads(text)
        return str(answer.get("message") or answer["error"]["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return text.strip()[:500]


def _read_generation(answer: Any, prompt_tokens: int) -> Generation:
    try:
        ids, meta = answer["output_ids"], answer["meta_info"]
        triples, spans = meta["output_token_logprobs"], meta["weight_versions"]
        finish = meta["finish_reason"]["type"]
        versions = [(span["start"], span["end"], span["version"]) for span in spans]
        prompt, cached, count = meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]
    except (KeyError, TypeError) as error:
        raise SamplerError(f"the sampler's answer lacks a field: {error!r}") from None
    logprobs = [triple[0] for triple in triples]
    if prompt != prompt_tokens:
        raise SamplerError(f"the sampler counted {prompt} prompt tokens where {prompt_tokens} were sent")
    if count != len(ids) or [triple[1] for triple in triples] != ids:
        raise SamplerError(f"the sampler's {count} tokens, {len(ids)} ids and {len(triples)} log-probabilities differ")
    for at, logprob in enumerate(logprobs):
        if not isinstance(logprob, (int, float)) or not math.isfinite(logprob) or logprob > LOGPROB_MAX:
            raise SamplerError(f"log-probability {logprob!r} of output token {at} is not one; are the weights numbers?")
    edges = [0] + [end for _, end, _ in versions]
    if [start for start, *_ in versions] != edges[:-1] or edges[-1] != len(ids):
        raise SamplerError(f"the weight versions {versions} do not cover the {len(ids)} output tokens")
    if finish not in ("stop", "length", "abort"):
        raise SamplerError(f"the finish reason {finish!r} is not known")
    return Generation(ids, [float(p) for p in logprobs], versions, finish, prompt, cached)
