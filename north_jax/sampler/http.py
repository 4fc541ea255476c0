"""What both faces of the server share: bodies within a limit, refusals as answers, server-sent events, API keys."""

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

MAX_BODY_BYTES = 32 << 20
# Answered without a key: a load balancer asks these, and they say nothing else than yes or no.
OPEN_PATHS = ("/health", "/ready")


class Refusal(Exception):
    """A request that is not served: one sentence, the HTTP status, OpenAI's error `code` and extra headers."""

    def __init__(self, message: str, status: int = 400, *, code: str | None = None, headers: dict | None = None):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON object that a request carries; {} for an empty body. Errors: Refusal 400, or 413 beyond the limit."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise Refusal(f"the request's body is larger than {MAX_BODY_BYTES >> 20} MiB; send less at once", 413)
    try:
        body = json.loads(raw) if raw else {}
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the request's body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refusal(f"the request's body must be a JSON object, not {type(body).__name__}")
    return body


def flag(body: dict[str, Any], name: str, default: bool = False) -> bool:
    """Takes a field that is true, false or not there out of a body. Errors: ValueError."""
    value = body.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return default if value is None else value


def native_error(message: str, status: int, code: str | None = None, headers: dict | None = None) -> Response:
    """An error as SGLang's native endpoints answer it."""
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status, headers=headers)


_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def openai_error(message: str, status: int, code: str | None = None, headers: dict | None = None) -> Response:
    """An error as OpenAI's endpoints answer it."""
    kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return JSONResponse(body, status_code=status, headers=headers)


def error_for(path: str) -> Callable[..., Response]:
    """The error form of an endpoint."""
    return openai_error if path.startswith("/v1/") else native_error


def answered(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """The handler with its errors as answers: a bad request is a 400, a stopped engine a 503."""

    async def endpoint(request: Request) -> Response:
        error = error_for(request.url.path)
        try:
            return await handler(request)
        except Refusal as refusal:
            return error(str(refusal), refusal.status, refusal.code, refusal.headers)
        except ValueError as problem:
            return error(str(problem), 400)
        except RuntimeError as problem:
            return error(str(problem), 503)

    return endpoint


async def disconnected(receive: Receive) -> None:
    """Returns when the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: a `data:` line of JSON for each value that `events` yields, then `data: [DONE]`.

    `release` is called exactly once, however the stream ends: at its end, when the client goes, or on an error (which
    becomes the last event, in the given form).
    """

    def __init__(self, events: AsyncIterator[dict], release: Callable[[], None], error: Callable[..., Response]):
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._release, self._error = events, release, error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(disconnected(receive))
        writing = asyncio.ensure_future(self._write(send))
        try:
            await asyncio.wait({gone, writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            writing.cancel()
            self._release()
            await asyncio.gather(gone, writing, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def line(text: bytes) -> None:
            await send({"type": "http.response.body", "body": b"data: " + text + b"\n\n", "more_body": True})

        try:
            async for event in self._events:
                await line(json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace"))
        except RuntimeError as problem:
            await line(bytes(self._error(str(problem), 503).body))
        await line(b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class KeyRequired:
    """ASGI middleware that refuses requests without `Authorization: Bearer KEY` by a 401."""

    def __init__(self, app: ASGIApp, key: str):
        self.app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            kind, _, key = given.partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
                message = "this server wants its API key; send the header Authorization: Bearer KEY"
                answer = error_for(scope["path"])(message, 401, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
                return await answer(scope, receive, send)
        return await self.app(scope, receive, send)
