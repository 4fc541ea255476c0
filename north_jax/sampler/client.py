"""The client of a sampling server that speaks SGLang's native HTTP interface: ours, or SGLang itself."""

import abc
import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import aiohttp

from north_jax.sampler.answer import (
    BUSY_STATUS,
    Busy,
    Generation,
    Increment,
    Lost,
    SamplerError,
    SamplerUnavailable,
    read_generation,
    read_increment,
)

__all__ = ["Asker", "Generation", "Increment", "SamplerClient", "SamplerError", "SamplerUnavailable"]

RETRY_FIRST_S = 0.1
RETRY_LONGEST_S = 2.0
ABORT_S = 2.0
Check = Callable[[Generation | Increment], None]


class Asker(abc.ABC):
    """Asks for completions, from one server (`SamplerClient`) or the best of many (`fleet.SamplerFleet`).

    An attempt whose connection was lost, or that met a server still starting, is made again until the deadline. Each
    attempt has an id of its own on the wire (`rid`, `rid.1`, ...) and the lost one is aborted first: SGLang refuses an
    id that it still works on, and its late answers could otherwise meet the new attempt. Nothing of a lost attempt is
    used, so a retry is as good as a first try, and with a seed the same.
    """

    def __init__(
        self, *, vocab_size: int, context: int, timeout_s: float = 120.0, experts: tuple[int, int] | None = None
    ):
        self.vocab_size, self.context, self.timeout_s, self.experts = vocab_size, context, timeout_s, experts
        self._wires: dict[str, tuple[SamplerClient, str]] = {}  # rid -> where it runs, and under which id

    async def generate(
        self, ids: Sequence[int], *, rid: str | None = None, timeout_s: float | None = None, **how
    ) -> Generation:
        """One completion of the prompt `ids`, as Generation; with a `seed` it does not depend on other requests.

        `how` is as for `body`. Errors: ValueError for a prompt that cannot be sent, SamplerError for a refusal or an
        answer with missing, contradictory or not-a-number fields, SamplerUnavailable at the deadline (the request is
        then aborted, as it is when the caller is cancelled).
        """
        body, rid = self.body(ids, **how), rid or uuid.uuid4().hex
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        wait_s, tries, last = RETRY_FIRST_S, 0, "no answer"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        async with self._server_for(body) as (server, check):
                            self._wires[rid] = server, f"{rid}.{tries}" if tries else rid
                            generation = await server._once(body, self._wires[rid][1])
                            check(generation)
                            return generation
                    except Lost as error:
                        last = str(error)
                        await self._abort_lost(rid, error)
                    tries += 1
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, RETRY_LONGEST_S)
        except TimeoutError:
            await self._abort_attempt(rid)
            raise SamplerUnavailable(f"{self._name}/generate gave no answer within {timeout_s:g} s ({last})") from None
        except asyncio.CancelledError:
            await self._abort_attempt(rid)
            raise
        finally:
            self._wires.pop(rid, None)

    async def stream(
        self, ids: Sequence[int], *, rid: str | None = None, timeout_s: float | None = None, **how
    ) -> AsyncIterator[Increment | Generation]:
        """As `generate`, token by token: Increments while they are drawn, and last the whole Generation.

        A caller that leaves early aborts the request (close the iterator: `contextlib.aclosing`). A server lost after
        the first increment is SamplerUnavailable, for what was yielded cannot be taken back.
        """
        body, rid = self.body(ids, **how) | {"stream": True}, rid or uuid.uuid4().hex
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = asyncio.get_running_loop().time() + timeout_s
        wait_s, tries, last, begun, done = RETRY_FIRST_S, 0, "no answer", False, False
        try:
            while True:
                try:
                    # A timeout must not span a yield: each wait below has the deadline for itself.
                    async with contextlib.AsyncExitStack() as stack:
                        async with asyncio.timeout_at(deadline):
                            server, check = await stack.enter_async_context(self._server_for(body))
                        self._wires[rid] = server, f"{rid}.{tries}" if tries else rid
                        items = server._stream_once(body, self._wires[rid][1], deadline)
                        async for item in await stack.enter_async_context(contextlib.aclosing(items)):
                            check(item)
                            begun, done = True, isinstance(item, Generation)
                            yield item
                        return
                except Lost as error:
                    last = str(error)
                    if begun:
                        raise SamplerUnavailable(f"the stream broke after its first tokens ({last})") from None
                    await self._abort_lost(rid, error)
                tries += 1
                async with asyncio.timeout_at(deadline):
                    await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_LONGEST_S)
        except TimeoutError:
            raise SamplerUnavailable(f"{self._name}/generate did not end within {timeout_s:g} s ({last})") from None
        finally:
            if not done:
                await self._abort_attempt(rid)
            self._wires.pop(rid, None)

    def body(
        self,
        ids: Sequence[int],
        *,
        temperature: float,
        max_new_tokens: int,
        top_p: float = 1.0,
        top_k: int | None = None,
        min_p: float | None = None,
        stop_ids: Iterable[int] = (),
        seed: int | None = None,
    ) -> dict[str, Any]:
        """The request for a completion of `ids`. Errors: ValueError for what a server must not be sent.

        An id outside the vocabulary ends an SGLang server. `max_new_tokens` is cut to what the context has room for.
        """
        ids, stop_ids = [int(i) for i in ids], [int(i) for i in stop_ids]
        if not ids or len(ids) >= self.context:
            raise ValueError(
                f"a prompt of {len(ids)} tokens does not fit the context of {self.context}; send 1 or more"
            )
        for what, values in (("prompt", ids), ("stop list", stop_ids)):
            if values and not 0 <= min(values) <= max(values) < self.vocab_size:
                raise ValueError(
                    f"the {what} has ids from {min(values)} to {max(values)}; the vocabulary has {self.vocab_size}"
                )
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; ask for 1 or more")
        params: dict[str, Any] = {
            "temperature": float(temperature),
            "top_p": float(top_p),
            "max_new_tokens": min(int(max_new_tokens), self.context - len(ids)),
        }
        optional = {
            "top_k": None if top_k is None else int(top_k),
            "min_p": None if min_p is None else float(min_p),
            "sampling_seed": None if seed is None else int(seed),
            "stop_token_ids": stop_ids or None,
        }
        params |= {name: value for name, value in optional.items() if value is not None}
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
        return body if self.experts is None else body | {"return_routed_experts": True}

    @abc.abstractmethod
    async def abort(self, rid: str | None = None) -> None:
        """End the request `rid`, or all; each answers with the tokens it has and finish reason "abort".

        SGLang ends every request whose id begins with `rid`: give ids of one length.
        """

    @abc.abstractmethod
    def _server_for(self, body: dict) -> contextlib.AbstractAsyncContextManager["tuple[SamplerClient, Check]"]:
        """The server for one attempt, and what raises Lost when its answer must not be used."""

    @property
    @abc.abstractmethod
    def _name(self) -> str:
        """Who is asked, for errors."""

    async def _abort_lost(self, rid: str, error: Lost) -> None:
        if not isinstance(error, Busy):  # then nothing runs, or for somebody else
            await self._abort_attempt(rid)
        self._wires.pop(rid, None)

    async def _abort_attempt(self, rid: str) -> None:
        if rid in self._wires:
            server, wire = self._wires[rid]
            await server._quietly_abort(wire)


class SamplerClient(Asker):
    """Asks one server. Every call has a deadline, until which lost connections are tried again.

    `vocab_size` and `context` (tokens of prompt and completion) are checked before anything is sent. `context` is what
    the server can fill: SGLang's context_length less 6. With `experts`, (layers, top_k), every Generation has its
    routed experts. With retry=False, calls other than generate and stream are not tried again: for who has other
    servers.
    """

    HEALTH_S = 5.0

    def __init__(self, url: str, *, retry: bool = True, **about):
        super().__init__(**about)
        self.url, self._retry = url.rstrip("/"), retry
        self._session: aiohttp.ClientSession | None = None
        self._closing: set[asyncio.Task] = set()

    async def __aenter__(self) -> "SamplerClient":
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        self.hang_up()
        await asyncio.gather(*self._closing)

    def hang_up(self) -> None:
        """Break all connections: what waits for an answer tries again, or is told that its attempt is lost."""
        if self._session is not None:
            closing = asyncio.get_running_loop().create_task(self._session.close())
            self._session = None
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def abort(self, rid: str | None = None) -> None:
        """As Asker.abort."""
        wire = self._wires[rid][1] if rid in self._wires else rid
        await self._post("/abort_request", {"abort_all": True} if wire is None else {"rid": wire})

    async def update_weights(
        self, path: str, version: str | int, *, flush_cache: bool = True, timeout_s: float | None = None
    ) -> None:
        """Have the server load the checkpoint folder `path` as `version`, and see that it then names this version.

        With `flush_cache` running requests have their keys and values computed again under the new weights.
        """
        body = {"model_path": str(path), "weight_version": str(version), "flush_cache": flush_cache}
        try:
            answer = await self._post("/update_weights_from_disk", body, timeout_s)
        except SamplerError as error:
            if "not flushed" in str(error):
                raise SamplerError(
                    f"{self.url} has the weights of {path} but its cache still holds the old ones' keys and values;"
                    f" pause with mode retract, or update with flush_cache=False ({error})"
                ) from None
            raise
        if answer.get("success") is not True:
            raise SamplerError(f"{self.url} did not take the weights of {path}: {answer.get('message', answer)}")
        serving = (await self.model_info(timeout_s)).get("weight_version")
        if serving != str(version):
            raise SamplerError(f"{self.url} took the weights of {path} but names version {serving!r}, not {version!r}")

    async def pause(self, mode: str, timeout_s: float | None = None) -> None:
        """Stop generating; running requests are aborted ("abort"), requeued ("retract") or frozen ("in_place")."""
        await self._post("/pause_generation", {"mode": mode}, timeout_s)

    async def resume(self, timeout_s: float | None = None) -> None:
        """Go on after `pause`."""
        await self._post("/continue_generation", {}, timeout_s)

    async def health(self) -> bool:
        """Whether the server answers and is ready."""
        try:
            async with asyncio.timeout(self.HEALTH_S), self._connected().get(f"{self.url}/ready") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def model_info(self, timeout_s: float | None = None) -> dict[str, Any]:
        """What is served: `weight_version`, `model_path` and more."""
        return await self._ask("GET", "/model_info", None, timeout_s)

    async def server_info(self, timeout_s: float | None = None) -> dict[str, Any]:
        """The server's counters."""
        return await self._ask("GET", "/server_info", None, timeout_s)

    async def weight_checksums(self, timeout_s: float | None = None) -> dict[str, Any]:
        """What /weights_checker says of the weights in the server's memory; `checksums.verify` reads it."""
        answer = await self._post("/weights_checker", {"action": "checksum"}, timeout_s)
        if answer.get("success") is not True:
            raise SamplerError(f"{self.url} could not sum up its weights: {answer.get('message', answer)}")
        return answer

    # -- one attempt --------------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return self.url

    @contextlib.asynccontextmanager
    async def _server_for(self, body: dict) -> AsyncIterator["tuple[SamplerClient, Check]"]:
        yield self, lambda answer: None

    async def _once(self, body: dict, wire: str) -> Generation:
        return self._read(await self._send("POST", "/generate", body | {"rid": wire}), body)

    async def _stream_once(self, body: dict, wire: str, deadline: float) -> AsyncIterator[Increment | Generation]:
        had: list[int] = []
        answer, ended = None, False
        async with contextlib.AsyncExitStack() as stack:
            with self._connection_errors("/generate"):
                async with asyncio.timeout_at(deadline):
                    request = self._connected().post(
                        f"{self.url}/generate", json=body | {"rid": wire}, timeout=aiohttp.ClientTimeout(total=None)
                    )
                    response = await stack.enter_async_context(request)
                    await self._refuse_bad_status("/generate", response)
            rest = b""
            while not ended:
                with self._connection_errors("/generate"):
                    async with asyncio.timeout_at(deadline):
                        chunk = await response.content.readany()
                if not chunk:
                    raise Lost(f"{self.url}/generate ended its stream in the middle")
                *lines, rest = (rest + chunk).split(b"\n")
                events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
                ended = b"[DONE]" in events
                # Each is the whole answer so far: of several that came together the last says all.
                if not (events := [event for event in events if event != b"[DONE]"]):
                    continue
                try:
                    answer = json.loads(events[-1])
                except ValueError as error:
                    raise SamplerError(f"{self.url}/generate streamed broken JSON: {error}") from None
                if "error" in answer:
                    raise SamplerError(f"{self.url}/generate answered in its stream: {_message(events[-1].decode())}")
                increment = read_increment(answer, had)
                if increment.ids:
                    had += increment.ids
                    yield increment
        if answer is None:
            raise SamplerError(f"{self.url}/generate streamed nothing")
        yield self._read(answer, body)

    def _read(self, answer: Any, body: dict) -> Generation:
        asked = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        experts = self.experts if "return_routed_experts" in body else None
        return read_generation(answer, prompt_tokens=asked[0], max_new_tokens=asked[1], experts=experts)

    async def _quietly_abort(self, wire: str) -> None:
        try:
            async with (
                asyncio.timeout(ABORT_S),
                self._connected().post(f"{self.url}/abort_request", json={"rid": wire}),
            ):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass  # the server is gone, and the request with it

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            # The sampler queues; a limit here would only hide the queue from it.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    async def _post(self, path: str, body: dict, timeout_s: float | None = None) -> Any:
        return await self._ask("POST", path, body, timeout_s)

    async def _ask(self, method: str, path: str, body: dict | None, timeout_s: float | None) -> Any:
        """The answer to a request that does no more when sent twice, as all but /generate are."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        wait_s, last = RETRY_FIRST_S, "no answer"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return await self._send(method, path, body)
                    except Lost as error:
                        if not self._retry:
                            raise
                        last = str(error)
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, RETRY_LONGEST_S)
        except TimeoutError:
            raise SamplerUnavailable(f"{self.url}{path} gave no answer within {timeout_s:g} s ({last})") from None

    async def _send(self, method: str, path: str, body: dict | None) -> Any:
        with self._connection_errors(path):
            async with self._connected().request(
                method, self.url + path, json=body, timeout=aiohttp.ClientTimeout(total=None)
            ) as response:
                await self._refuse_bad_status(path, response)
                if response.content_type != "application/json":
                    return await response.text()
                text = await response.text()
        try:
            return json.loads(text)
        except ValueError as error:
            raise SamplerError(f"{self.url}{path} answered with broken JSON: {error}") from None

    @contextlib.contextmanager
    def _connection_errors(self, path: str):
        try:
            yield
        except TimeoutError:
            raise  # an OSError, but the caller's deadline
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as e:
            raise Lost(f"{self.url}{path}: {type(e).__name__}: {e}") from None

    async def _refuse_bad_status(self, path: str, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        message = _message(await response.text())
        # A lost attempt that the server has not noticed yet holds its id; the next has another.
        busy = response.status in BUSY_STATUS or "Duplicate request ID" in message
        raise (Busy if busy else SamplerError)(f"{self.url}{path} answered {response.status}: {message}")


def _message(text: str) -> str:
    """The sentence in an error answer, whichever of the server's forms it has."""
    try:
        answer = json.loads(text)
        return str(answer.get("message") or answer["error"]["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return text.strip()[:500]
