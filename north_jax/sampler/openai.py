"""OpenAI-compatible endpoints over the engine: /v1/models, /v1/chat/completions, /v1/completions.

Prompts are rendered by the checkpoint folder's chat template, completions read by our parser. `return_token_ids` and
`return_meta_info` make an answer exact to the token, in SGLang's spelling and in vLLM's.
"""

import dataclasses
import pathlib
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from north_jax.chat.parse import ParseError, parse_completion
from north_jax.chat.prompt import PromptFormat
from north_jax.chat.stream import Piece, StreamReader
from north_jax.sampler.engine import Result
from north_jax.sampler.http import EventStream, Refusal, answered, openai_error, read_body
from north_jax.sampler.intake import Intake, Ticket, finished, updates
from north_jax.sampler.native import Native, finite, logprob_triples, meta_info
from north_jax.sampler.openai_request import Asked, read_chat, read_completion


class OpenAI:
    """The endpoints; `native` knows what is served."""

    def __init__(self, intake: Intake, native: Native):
        self.intake, self.native = intake, native
        self.started = int(time.time())
        self._prompts = PromptFormat(intake.tokenizer) if intake.tokenizer is not None else None

    def routes(self) -> list[Route]:
        """What the application serves of this."""
        return [
            Route("/v1/models", answered(self.models), methods=["GET"]),
            Route("/v1/models/{name:path}", answered(self.model), methods=["GET"]),
            Route("/v1/chat/completions", answered(self.chat), methods=["POST"]),
            Route("/v1/completions", answered(self.completions), methods=["POST"]),
        ]

    @property
    def name(self) -> str:
        """The served model's name: its folder's."""
        return pathlib.Path(self.native.path).name

    def _model(self) -> dict[str, Any]:
        more = {"root": self.native.path, "max_model_len": self.intake.engine.context}
        return {"id": self.name, "object": "model", "created": self.started, "owned_by": "north_jax"} | more

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the one that is served. Requests may name it as they like."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        if (name := request.path_params["name"]) != self.name:
            raise Refusal(f"the model {name!r} does not exist here; {self.name!r} does", 404, code="model_not_found")
        return JSONResponse(self._model())

    def _needs_tokenizer(self) -> PromptFormat:
        if self._prompts is None:
            raise Refusal("this checkpoint has no tokenizer, which chats and texts need; use /generate with input_ids")
        return self._prompts

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked = read_chat(await read_body(request), self._needs_tokenizer(), self.intake.engine.context)
        return await self._answer(request, asked, _Chat)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        encode = self._needs_tokenizer().tokenizer.encode_marked
        asked = read_completion(await read_body(request), encode, self.intake.engine.context)
        return await self._answer(request, asked, _Text)

    async def _answer(self, request: Request, asked: Asked, kind: "type[_Chat | _Text]") -> Response:
        tickets = self.intake.open(asked.jobs)
        choices = [kind(index, ticket, asked, self.intake.tokenizer) for index, ticket in enumerate(tickets)]
        about = {
            "id": f"{kind.prefix}-{uuid.uuid4().hex}",
            "object": kind.object,
            "created": int(time.time()),
            "model": asked.model or self.name,
        }
        if asked.stream:
            events = self._events(asked, choices, about | {"object": kind.chunk_object})
            return EventStream(events, lambda: self.intake.close(tickets), openai_error)
        try:
            if not await finished(tickets, request.receive):
                return Response(status_code=499)  # nobody reads it
        finally:
            self.intake.close(tickets)
        body = about | {"choices": [choice.whole() for choice in choices], "usage": _usage(choices, asked.n)}
        body["metadata"] = _metadata(tickets)
        if asked.prompt_ids or asked.token_ids:
            body["prompt_token_ids"] = tickets[0].job.ids
        return JSONResponse(body)

    async def _events(self, asked: Asked, choices: list, about: dict) -> AsyncIterator[dict]:
        def event(of: list[dict], **more: Any) -> dict:
            return about | {"choices": of} | more | ({"usage": None} if asked.usage and "usage" not in more else {})

        head = {"prompt_token_ids": choices[0].ticket.job.ids} if asked.prompt_ids or asked.token_ids else {}
        for choice in choices:
            for opening in choice.opening():
                yield event([opening], **head)
        async for index, ticket in updates([choice.ticket for choice in choices]):
            for chunk in choices[index].chunks(ticket.result):
                yield event([chunk])
        if asked.usage:
            metadata = _metadata([choice.ticket for choice in choices])
            yield event([], usage=_usage(choices, asked.n), metadata=metadata)


@dataclasses.dataclass
class _Choice:
    """One completion on its way into `choices`."""

    index: int
    ticket: Ticket
    asked: Asked
    tokenizer: Any

    def __post_init__(self):
        self.told = 0  # tokens whose ids and log-probabilities are in the stream

    def exact(self, result: Result, start: int = 0) -> dict[str, Any]:
        """The fields of a choice that were asked for beside the text, for the tokens from `start`."""
        fields: dict[str, Any] = {}
        if self.asked.token_ids:
            fields["token_ids"] = fields["response_token_ids"] = result.ids[start:]
        if self.asked.meta_info and result.finish is not None:
            fields["meta_info"] = meta_info(result) | {"output_token_logprobs": logprob_triples(result)}
        return fields

    def spelt(self, result: Result, start: int) -> list[tuple[bytes, float | None]]:
        """(bytes, log-probability) of the tokens from `start`."""
        t = self.tokenizer
        pairs = zip(result.ids[start:], result.logprobs[start:], strict=True)
        return [(t.decode_bytes([i]) if i < t.vocab_size else b"", finite(p)) for i, p in pairs]


class _Chat(_Choice):
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __post_init__(self):
        super().__post_init__()
        self.reader = StreamReader(self.tokenizer, reasoning=self.asked.reasoning)
        self.fed = self.calls = 0
        self.ahead = [piece for id_ in self.asked.forced for piece in self.reader.feed(id_)]
        self.reader.reasoning_tokens = 0  # what was forced was not drawn

    @property
    def reasoning_tokens(self) -> int:
        return self.reader.reasoning_tokens

    def _read(self, result: Result) -> list[Piece]:
        """The pieces in the tokens that are new and can no longer become part of a stop string."""
        text, pieces, self.ahead = self.ticket.text, self.ahead, []
        settled, ended = text.settled, result.finish is not None
        while self.fed < len(text.ends) and (ended or text.ends[self.fed] <= settled):
            start = text.ends[self.fed - 1] if self.fed else 0
            keep = None if text.match is None or text.ends[self.fed] <= settled else max(0, settled - start)
            pieces += self.reader.feed(result.ids[self.fed], keep)
            self.fed += 1
        return pieces + (self.reader.close() if ended else [])

    def whole(self) -> dict[str, Any]:
        result = self.ticket.result
        try:
            turn = parse_completion(self.tokenizer, [*self.asked.forced, *result.ids], reasoning=self.asked.reasoning)
            reasoning, content, calls = turn.reasoning, turn.text, turn.tool_calls if self.asked.calls else ()
            if turn.tool_calls and not calls:
                raise ParseError("unexpected_content")  # calls though no tool was offered: shown as they are written
            pieces = self._read(result)  # counts the reasoning
        except ParseError:
            pieces, calls = self._read(result), ()
            reasoning = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
            content = "".join(piece.text for piece in pieces if piece.kind == "text") + self.reader.action
        message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": reasoning or None}
        if calls:
            written = iter(_arguments(pieces))
            message["tool_calls"] = [
                {"id": _call_id(), "type": "function", "function": {"name": call.name, "arguments": next(written)}}
                for call in calls[: 1 if self.asked.one_call else None]
            ]
        logprobs = {"content": self._logprobs(result, 0), "refusal": None} if self.asked.logprobs else None
        choice = {"index": self.index, "message": message, "logprobs": logprobs}
        return choice | {"finish_reason": _reason(result, bool(calls))} | self.exact(result)

    def opening(self) -> list[dict[str, Any]]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def chunks(self, result: Result) -> list[dict[str, Any]]:
        """The chunks for what is new in the result so far."""
        deltas = [delta for piece in self._read(result) for delta in self._delta(piece)]
        if result.finish is not None and not self.calls and self.reader.action:
            deltas.append({"content": self.reader.action})  # a block in which no call could be made out
        chunks = [self._chunk(delta) for delta in deltas]
        if (self.asked.logprobs or self.asked.token_ids) and len(result.ids) > self.told:
            chunks = chunks or [self._chunk({})]
            if self.asked.logprobs:
                chunks[0]["logprobs"] = {"content": self._logprobs(result, self.told), "refusal": None}
            if self.asked.token_ids:
                chunks[0]["token_ids"] = result.ids[self.told :]
            self.told = len(result.ids)
        if result.finish is not None:
            last = self._chunk({}) | {"finish_reason": _reason(result, self.calls > 0)}
            chunks.append(last | {key: value for key, value in self.exact(result).items() if key == "meta_info"})
        return chunks

    def _delta(self, piece: Piece) -> list[dict[str, Any]]:
        if piece.kind == "reasoning":
            return [{"reasoning_content": piece.text}]
        if piece.kind == "text":
            return [{"content": piece.text}]
        if not self.asked.calls or (self.asked.one_call and piece.call > 0):
            return []
        if piece.kind == "name":
            self.calls += 1
            function = {"name": piece.text, "arguments": ""}
            return [{"tool_calls": [{"index": piece.call, "id": _call_id(), "type": "function", "function": function}]}]
        return [{"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}]

    def _chunk(self, delta: dict) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, result: Result, start: int) -> list[dict[str, Any]]:
        return [
            {"token": b.decode("utf-8", "replace"), "logprob": p, "bytes": list(b), "top_logprobs": []}
            for b, p in self.spelt(result, start)
        ]


class _Text(_Choice):
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"
    reasoning_tokens = 0

    def __post_init__(self):
        super().__post_init__()
        self.sent = 0

    def _shown(self, result: Result) -> str:
        return self.ticket.text.shown(result, trim=True, skip=self.tokenizer.special)

    def whole(self) -> dict[str, Any]:
        result = self.ticket.result
        choice = {"index": self.index, "text": self._shown(result), "logprobs": self._logprobs(result, 0)}
        return choice | {"finish_reason": _reason(result, False)} | self.exact(result)

    def opening(self) -> list[dict[str, Any]]:
        return []

    def chunks(self, result: Result) -> list[dict[str, Any]]:
        """The chunk for what is new in the result so far."""
        text, reason = self._shown(result), None if result.finish is None else _reason(result, False)
        chunk = {"index": self.index, "text": text[self.sent :], "logprobs": self._logprobs(result, self.told)}
        chunk |= {"finish_reason": reason} | self.exact(result, self.told)
        self.sent, self.told = len(text), len(result.ids)
        return [chunk]

    def _logprobs(self, result: Result, start: int) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        ends = [0, *self.ticket.text.ends]
        spelt = self.spelt(result, start)
        return {
            "tokens": [b.decode("utf-8", "replace") for b, _ in spelt],
            "token_logprobs": [p for _, p in spelt],
            "top_logprobs": None,
            "text_offset": ends[start : start + len(spelt)],
        }


def _arguments(pieces: list[Piece]) -> list[str]:
    """The arguments of each call as the model wrote them."""
    texts: dict[int, str] = {}
    for piece in pieces:
        if piece.kind == "arguments":
            texts[piece.call] = texts.get(piece.call, "") + piece.text
    return list(texts.values())


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _reason(result: Result, calls: bool) -> str:
    """OpenAI's finish_reason; "abort" for a request that was ended from outside, as SGLang says it."""
    kind = result.finish[0]
    return "tool_calls" if kind == "stop" and calls else kind


def _metadata(tickets: list[Ticket]) -> dict[str, Any]:
    spans = [meta_info(ticket.result)["weight_versions"] for ticket in tickets]
    return {"weight_versions": spans[0] if len(spans) == 1 else spans}


def _usage(choices: list, n: int) -> dict[str, Any]:
    results = [choice.ticket.result for choice in choices]
    prompt, drawn = sum(r.prompt_tokens for r in results[::n]), sum(len(r.ids) for r in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": drawn,
        "total_tokens": prompt + drawn,
        "prompt_tokens_details": {"cached_tokens": sum(r.cached_tokens for r in results[::n])},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)},
    }
