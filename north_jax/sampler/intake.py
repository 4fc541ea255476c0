"""Requests on their way through the engine: a bounded number, who waits for each, stop strings, draining."""

import asyncio
import codecs
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.types import Receive

from north_jax.chat.tokenizer import Tokenizer
from north_jax.sampler.engine import Engine, Result
from north_jax.sampler.http import Refusal, disconnected
from north_jax.sampler.metrics import Metrics
from north_jax.sampler.sampling import Sampling

MAX_STOP_STRINGS, MAX_STOP_BYTES = 16, 1024


@dataclasses.dataclass(frozen=True)
class Job:
    """One completion to be drawn. `asked` is what a retry under the same `rid` must repeat to join it."""

    rid: str
    ids: list[int]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stream: bool = False
    asked: Any = None


class Text:
    """The bytes of a completion as its tokens come, and where in them one of the stop strings begins."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._tokenizer, self._stop = tokenizer, [text.encode() for text in stop]
        self._longest = max(map(len, self._stop), default=1)
        self.data = bytearray()
        self.ends: list[int] = []  # of each token, in `data`
        self.match: tuple[str, int] | None = None  # the stop string, and where it begins

    def read(self, ids: Sequence[int]) -> bool:
        """Reads the tokens it has not seen yet of all so far; whether a stop string was found, now or before."""
        for id_ in ids[len(self.ends) :]:
            if self.match is not None:
                break
            start = max(0, len(self.data) - self._longest + 1)
            self.data += self._tokenizer.decode_bytes([id_]) if id_ < self._tokenizer.vocab_size else b""
            self.ends.append(len(self.data))
            found = [(at, stop) for stop in self._stop if (at := self.data.find(stop, start)) >= 0]
            if found:
                at, stop = min(found)
                self.match = (stop.decode(), at)
        return self.match is not None

    @property
    def settled(self) -> int:
        """How many of the bytes can no longer become part of a stop string."""
        if self.match is not None:
            return self.match[1]
        for length in range(min(self._longest - 1, len(self.data)), 0, -1):
            tail = bytes(self.data[-length:])
            if any(stop.startswith(tail) for stop in self._stop):
                return len(self.data) - length
        return len(self.data)

    def shown(self, result: Result, *, trim: bool, skip: frozenset[int] = frozenset()) -> str:
        """The text of the result so far: without tokens in `skip` and, with `trim`, without what ended it."""
        ended = result.finish is not None
        limit = len(self.data) if ended else self.settled
        if self.match is not None:
            limit = self.match[1] + (0 if trim else len(self.match[0].encode()))
        ids = result.ids[: len(self.ends)]
        if trim and ended and result.finish[0] == "stop" and self.match is None:
            ids = ids[:-1]
        out, start = bytearray(), 0
        for id_, end in zip(ids, self.ends, strict=False):
            if id_ not in skip:
                out += self.data[start : min(end, max(limit, start))]
            start = end
        # A character whose last bytes are still to come is not shown in part.
        return codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(out), final=ended)


class Ticket:
    """A request in the engine, for everybody who waits for it."""

    def __init__(self, job: Job, tokenizer: Tokenizer | None, abort):
        self.job, self.waiters, self.born = job, 0, time.monotonic()
        self.result: Result | None = None  # so far; its `finish` says whether that is all
        self.error: BaseException | None = None
        self.ended = False
        self.text = Text(tokenizer, job.stop) if tokenizer is not None else None
        self.watchers: set[asyncio.Event] = set()
        self._abort, self._last = abort, self.born

    def update(self, result: Result, metrics: Metrics) -> None:
        """More tokens were drawn."""
        if self.ended or (self.text is not None and self.text.match is not None):
            return
        if new := len(result.ids) - (len(self.result.ids) if self.result is not None else 0):
            metrics.drawn(self.born, self._last, new)
            self._last = time.monotonic()
        self.result = result
        if self.text is not None and self.text.read(result.ids):
            self.result = _cut(result, self.text, None)
            self._abort(self.job.rid)  # the rest is not wanted
        self._tell()

    def end(self, result: Result | None, error: BaseException | None, metrics: Metrics) -> None:
        """The engine is done with it."""
        self.ended, self.error = True, error
        if result is not None:
            if self.job.stream and self._last == self.born and result.ids:
                metrics.drawn(self.born, self.born, len(result.ids))
            if self.text is not None and self.text.read(result.ids):
                result = _cut(result, self.text, ("stop", self.text.match[0]))
            self.result = result
            metrics.done(result)
        self._tell()

    def _tell(self) -> None:
        # Whoever follows this ticket looks again.
        for event in self.watchers:
            event.set()


def _cut(result: Result, text: Text, finish: tuple[str, Any] | None) -> Result:
    """The result up to the token in which the stop string ends."""
    count = len(text.ends)
    experts = result.experts
    return dataclasses.replace(
        result,
        ids=result.ids[:count],
        logprobs=result.logprobs[:count],
        spans=[(version, start, min(end, count)) for version, start, end in result.spans if start < count],
        experts=None if experts is None else experts[: result.prompt_tokens + count - 1],
        finish=finish,
    )


class Intake:
    """Hands requests to the engine, at most `limit` at once, and keeps those that somebody waits for.

    The same rid and content again is a retry after a lost connection: it joins the running request. When the last one
    that waits for a request has gone, it is aborted. All methods belong to the event loop's thread.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, metrics: Metrics, limit: int):
        self.engine, self.tokenizer, self.metrics, self.limit = engine, tokenizer, metrics, limit
        self.ready = self.draining = False
        self.tickets: dict[str, Ticket] = {}
        self._idle = asyncio.Event()

    def open(self, jobs: Sequence[Job]) -> list[Ticket]:
        """A ticket for each job, to be given back to `close`. Errors: Refusal, ValueError; nothing is then queued."""
        if self.draining or not self.ready:
            why = "the server is shutting down; ask another" if self.draining else "the sampler is still compiling"
            raise Refusal(f"{why}; /ready answers 200 when requests are taken", 503, headers={"Retry-After": "1"})
        if len({job.rid for job in jobs}) < len(jobs):
            raise ValueError("two requests of the batch have one rid; make them differ")
        if len(jobs) > self.limit:
            raise ValueError(f"{len(jobs)} completions in one request; at most {self.limit} are taken, ask in parts")
        for job in jobs:
            self.engine.check(job.ids, job.sampling)
            _check_stop(job.stop, self.tokenizer)
            if (known := self.tickets.get(job.rid)) and known.job.asked != job.asked:
                raise ValueError(f"rid {job.rid!r} belongs to another request that is running; choose a new one")
        new = sum(job.rid not in self.tickets for job in jobs)
        if len(self.tickets) + new > self.limit:
            raise Refusal(
                f"{len(self.tickets)} requests are open and at most {self.limit} are taken; ask again later",
                429,
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )
        tickets = [self._ticket(job) for job in jobs]
        for ticket in tickets:
            ticket.waiters += 1
        return tickets

    def _ticket(self, job: Job) -> Ticket:
        if (known := self.tickets.get(job.rid)) is not None:
            return known
        ticket = self.tickets[job.rid] = Ticket(job, self.tokenizer, self.engine.abort)
        loop = asyncio.get_running_loop()

        def in_loop(function, *args) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is left to be told
                loop.call_soon_threadsafe(function, *args)

        def listen(result: Result) -> None:
            in_loop(ticket.update, result, self.metrics)

        def end(future) -> None:
            error = future.exception()
            in_loop(ticket.end, None if error else future.result(), error, self.metrics)

        # A listener costs the engine a copy of the tokens at every step.
        listener = listen if job.stream or job.stop else None
        self.engine.submit(job.rid, job.ids, job.sampling, listener).add_done_callback(end)
        return ticket

    def close(self, tickets: Sequence[Ticket]) -> None:
        """The caller no longer waits for these."""
        for ticket in tickets:
            ticket.waiters -= 1
            if ticket.waiters == 0:
                del self.tickets[ticket.job.rid]
                if not ticket.ended:
                    self.engine.abort(ticket.job.rid)
        if not self.tickets:
            self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Takes nothing more, and returns when all open requests are answered; after `seconds` they are aborted."""
        self.draining = True
        for after_abort in (False, True):
            try:
                async with asyncio.timeout(2.0 if after_abort else seconds):
                    while self.tickets:
                        self._idle.clear()
                        await self._idle.wait()
                    return
            except TimeoutError:
                self.engine.abort(None)


async def updates(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, Ticket]]:
    """(index, ticket) whenever one of the tickets has more tokens or has ended, until all have ended.

    Errors: RuntimeError where the engine has stopped.
    """
    event = asyncio.Event()
    for ticket in tickets:
        ticket.watchers.add(event)
    try:
        left: dict[int, Result | None] = dict.fromkeys(range(len(tickets)))  # index -> the last result yielded
        while left:
            event.clear()
            for i in list(left):
                ticket = tickets[i]
                if ticket.error is not None:
                    raise RuntimeError(str(ticket.error)) from ticket.error
                ended = ticket.ended
                if ticket.result is not left[i]:
                    left[i] = ticket.result
                    yield i, ticket
                if ended:
                    del left[i]
            if left:
                await event.wait()
    finally:
        for ticket in tickets:
            ticket.watchers.discard(event)


async def finished(tickets: Sequence[Ticket], receive: Receive) -> bool:
    """Waits until all have ended; False where the client has gone before. Errors: RuntimeError as `updates`."""

    async def wait() -> None:
        async for _ in updates(tickets):
            pass

    gone, done = asyncio.ensure_future(disconnected(receive)), asyncio.ensure_future(wait())
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            done.result()
        return done.done()
    finally:
        gone.cancel()
        done.cancel()


def _check_stop(stop: Sequence[str], tokenizer: Tokenizer | None) -> None:
    if stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the checkpoint has none; use stop_token_ids")
    if len(stop) > MAX_STOP_STRINGS or any(not text or len(text.encode()) > MAX_STOP_BYTES for text in stop):
        raise ValueError(f"stop takes up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_BYTES} bytes each")


def stop_strings(value: Any, where: str) -> tuple[str, ...]:
    """The field `stop` of a request: nothing, one string, or a list of them."""
    stop = [value] if isinstance(value, str) and value else value or []
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise ValueError(f"{where} must be a string or a list of strings, not {value!r}")
    return tuple(stop)
