"""SGLang's native HTTP contract: /generate and the control endpoints. Source: SGLang 0.5.23."""

import asyncio
import base64
import dataclasses
import math
import os
import pathlib
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from north_jax.sampler.engine import Result
from north_jax.sampler.http import EventStream, answered, flag, native_error, read_body
from north_jax.sampler.intake import Intake, Job, Ticket, finished, stop_strings, updates
from north_jax.sampler.metrics import CONTENT_TYPE
from north_jax.sampler.sampling import Sampling, refuse_unless_neutral
from north_jax.weights import hf
from north_jax.weights.folder import read_manifest

# Fields of SGLang's requests that are accepted only with a value that changes nothing.
_NEUTRAL_GENERATE: dict[str, tuple] = {
    "logprob_start_len": (-1, None),
    "top_logprobs_num": (0, None),
    "token_ids_logprob": (None,),
    "return_text_in_logprobs": (False, None),
    "return_hidden_states": (False, None),
    "return_sampling_mask": (False, None),
    "return_entropy": (False, None),
    "session_params": (None,),
    "session_id": (None,),
    "lora_path": (None,),
    "priority": (None,),
    "extra_key": (None,),
    "cache_salt": (None,),
    "routing_key": (None,),
    "custom_logit_processor": (None,),
}
_NEUTRAL_UPDATE: dict[str, tuple] = {
    "load_format": (None, "auto"),
    "is_async": (False,),
    "torch_empty_cache": (False,),
    "keep_pause": (False,),
    "recapture_cuda_graph": (False,),
    "token_step": (0,),
    "manifest": (None,),
}
_NEUTRAL_CHECKER: dict[str, tuple] = {
    "skip_tensor_list": (None, []),
    "selector": ("all", "target", None),
    "allow_quant_error": (False, None),
}


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """What an answer of /generate shall hold."""

    as_list: bool
    stream: bool
    logprobs: bool
    prompt_ids: bool
    experts_from: int | None  # None: no routed experts
    trims: list[bool]  # per job: leave out of `text` what ended it
    skips: list[bool]  # per job: leave special tokens out of `text`


class Native:
    """The native endpoints over one engine. `path` is the folder its weights came from."""

    def __init__(self, intake: Intake, path: str):
        self.intake, self.engine, self.path = intake, intake.engine, path
        self._updating = asyncio.Lock()

    def routes(self) -> list[Route]:
        """What the application serves of this."""
        posts = {
            "/generate": self.generate,
            "/update_weights_from_disk": self.update_weights_from_disk,
            "/weights_checker": self.weights_checker,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/abort_request": self.abort_request,
        }
        gets = {
            "/health": self.health,
            "/ready": self.health,
            "/model_info": self.model_info,
            "/server_info": self.server_info,
            "/metrics": self.metrics,
        }
        routes = [Route(path, answered(handler), methods=["POST"]) for path, handler in posts.items()]
        routes += [Route(path, answered(handler), methods=["GET"]) for path, handler in gets.items()]
        return [*routes, Route("/flush_cache", answered(self.flush_cache), methods=["GET", "POST"])]

    async def generate(self, request: Request) -> Response:
        """POST /generate: {text, output_ids, meta_info}, a list of them for a batch or n > 1, or a stream of them.

        `text` only where the checkpoint has a tokenizer. A stream's events are cumulative, and have an `index` where
        there are several completions.
        """
        jobs, wanted = self._parse(await read_body(request))
        tickets = self.intake.open(jobs)
        if wanted.stream:
            events = self._events(tickets, wanted)
            return EventStream(events, lambda: self.intake.close(tickets), native_error)
        try:
            if not await finished(tickets, request.receive):
                return Response(status_code=499)  # nobody reads it
            answers = [self._answer(index, ticket, wanted) for index, ticket in enumerate(tickets)]
        finally:
            self.intake.close(tickets)
        return JSONResponse(answers if wanted.as_list else answers[0])

    async def _events(self, tickets: list[Ticket], wanted: _Wanted) -> AsyncIterator[dict]:
        async for index, ticket in updates(tickets):
            answer = self._answer(index, ticket, wanted)
            yield {"index": index} | answer if wanted.as_list else answer

    def _parse(self, body: dict) -> tuple[list[Job], _Wanted]:
        if "input_embeds" in body or ("text" in body and "input_ids" in body):
            raise ValueError("a request has either text or input_ids, and no input_embeds")
        if "text" in body:
            prompts, batch = _texts(body.pop("text"))
            if self.intake.tokenizer is None:
                raise ValueError("the checkpoint has no tokenizer, so the sampler takes input_ids only")
            prompts = [self.intake.tokenizer.encode_marked(text) for text in prompts]
        elif "input_ids" in body:
            ids = body.pop("input_ids")
            batch = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
            prompts = ids if batch else [ids]
        else:
            raise ValueError("input_ids is missing")
        params, rids = body.pop("sampling_params", None) or {}, body.pop("rid", None)
        stream, logprobs = flag(body, "stream"), flag(body, "return_logprob")
        prompt_ids, experts = flag(body, "return_prompt_token_ids"), flag(body, "return_routed_experts")
        experts_from = body.pop("routed_experts_start_len", None) or 0
        if experts and not self.engine.experts:
            raise ValueError("return_routed_experts=True is not implemented by this sampler; leave it out")
        if type(experts_from) is not int or experts_from < 0:
            raise ValueError(f"routed_experts_start_len must be a whole number from 0, not {experts_from!r}")
        refuse_unless_neutral(body, _NEUTRAL_GENERATE)
        params = params if isinstance(params, list) else [params] * len(prompts)
        if isinstance(rids, str) and batch:
            rids = [f"{rids}_{i}" for i in range(len(prompts))]
        rids = rids if isinstance(rids, list) else [rids] * len(prompts)
        if not len(prompts) == len(params) == len(rids):
            raise ValueError(
                f"{len(prompts)} prompts with {len(params)} sampling_params and {len(rids)} rids; give as many"
            )
        jobs, trims, skips = [], [], []
        for prompt, fields, rid in zip(prompts, params, rids, strict=True):
            if rid is not None and (not isinstance(rid, str) or not rid):
                raise ValueError(f"rid must be text, not {rid!r}")
            rid = rid or uuid.uuid4().hex
            rest = dict(fields) if isinstance(fields, dict) else fields
            stop = stop_strings(rest.pop("stop", None) if isinstance(rest, dict) else None, "sampling_params.stop")
            sampling, number = Sampling.from_json(rest)
            for i in range(number):
                # With one seed for all, n completions would be one completion n times.
                each = dataclasses.replace(sampling, seed=sampling.seed + i)
                name = rid if number == 1 else f"{rid}_{i}"
                jobs.append(Job(name, prompt, each, stop, stream, (prompt, fields, stream)))
                trims.append(not fields.get("no_stop_trim"))
                skips.append(fields.get("skip_special_tokens") is not False)
        several = batch or len(jobs) > 1
        return jobs, _Wanted(several, stream, logprobs, prompt_ids, experts_from if experts else None, trims, skips)

    def _answer(self, index: int, ticket: Ticket, wanted: _Wanted) -> dict[str, Any]:
        result, answer = ticket.result, {}
        if ticket.text is not None:
            skip = self.intake.tokenizer.special if wanted.skips[index] else frozenset()
            answer["text"] = ticket.text.shown(result, trim=wanted.trims[index], skip=skip)
        answer["output_ids"] = result.ids
        if wanted.prompt_ids:
            answer["prompt_token_ids"] = ticket.job.ids
        answer["meta_info"] = meta = meta_info(result)
        if wanted.logprobs:
            meta["output_token_logprobs"] = logprob_triples(result)
            meta["output_token_logprobs_length"] = len(result.ids)
        if wanted.experts_from is not None and result.finish is not None:
            chosen = result.experts[wanted.experts_from :]
            meta["routed_experts"] = base64.b64encode(np.ascontiguousarray(chosen, "<i4").tobytes()).decode()
        return answer

    async def update_weights_from_disk(self, request: Request) -> Response:
        """POST: load the Hugging Face folder `model_path` and swap it in between two device calls.

        Running requests go on under the new weights: with `flush_cache` (default) what they have is computed again,
        without it their old keys and values stay. `weight_version` defaults to the folder's own, then to its name.
        A folder that cannot be loaded is a 400, and weights and version stay as they were.
        """
        body = await read_body(request)
        path, version = body.pop("model_path", None), body.pop("weight_version", None)
        flush, abort_all = flag(body, "flush_cache", True), flag(body, "abort_all_requests")
        if not isinstance(path, str):
            raise ValueError("update needs model_path (text)")
        refuse_unless_neutral(body, _NEUTRAL_UPDATE)
        async with self._updating:
            try:
                model = await asyncio.to_thread(hf.load, path, self.engine.dtype, mesh=self.engine.mesh)
                version = folder_version(path) if version is None else str(version)
                if abort_all:
                    await asyncio.wrap_future(self.engine.abort(None))
                swap = await asyncio.to_thread(self.engine.swap, model, version, flush_cache=flush)
                await asyncio.wrap_future(swap)
            except (ValueError, OSError) as error:
                return _verdict(False, str(error))
            self.path = path
        stats = await asyncio.wrap_future(self.engine.stats())
        paused = stats["running"] if stats["paused"] else 0
        return _verdict(True, f"serving {path} as version {version}", num_paused_requests=paused)

    async def weights_checker(self, request: Request) -> Response:
        """POST: `action` "checksum": XXH3 of every tensor the engine holds now, by its name on disk.

        They equal the `checksums` of the folder's north_manifest.json where the weights are served in the folder's own
        type and are not quantised.
        """
        body = await read_body(request)
        if (action := body.pop("action", None)) != "checksum":
            raise ValueError(f"action must be 'checksum', not {action!r}")
        refuse_unless_neutral(body, _NEUTRAL_CHECKER)
        # Taken together between two device calls: the arrays of one version, which a swap replaces but never writes.
        held = self.engine.model()
        version, model = await asyncio.wrap_future(held)
        checksums = await asyncio.to_thread(hf.checksums, model)
        return _verdict(True, f"{len(checksums)} tensors", checksums=checksums, weight_version=version)

    async def pause_generation(self, request: Request) -> Response:
        """POST: `mode` "abort" (default), "retract" or "in_place", as Engine.pause."""
        body = await read_body(request)
        mode = body.pop("mode", "abort")
        refuse_unless_neutral(body, {})
        await asyncio.wrap_future(self.engine.pause(mode))
        return JSONResponse({"status": "ok", "message": f"generation is paused, mode {mode}"})

    async def continue_generation(self, request: Request) -> Response:
        """POST: go on after a pause."""
        refuse_unless_neutral(await read_body(request), {"torch_empty_cache": (True, False)})
        await asyncio.wrap_future(self.engine.resume())
        return JSONResponse({"status": "ok", "message": "generation goes on"})

    async def abort_request(self, request: Request) -> Response:
        """POST: `rid`, or `abort_all` true. The aborted /generate answers 200 with the tokens it has."""
        body = await read_body(request)
        rid, abort_all = body.pop("rid", None), flag(body, "abort_all")
        refuse_unless_neutral(body, {"abort_message": (None,)})
        if not abort_all and (not isinstance(rid, str) or not rid):
            raise ValueError("abort needs rid (text), or abort_all true")
        await asyncio.wrap_future(self.engine.abort(None if abort_all else rid))
        return Response(status_code=200)

    async def flush_cache(self, request: Request) -> Response:
        """GET or POST: forget cached prefixes; 400 while requests run."""
        if await asyncio.wrap_future(self.engine.flush()):
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Cache not flushed: requests are running; wait or abort them.\n", status_code=400)

    async def health(self, request: Request) -> Response:
        """GET /health and /ready: 200 when every program is compiled and the engine's loop turns, else 503."""
        if not self.intake.ready or self.intake.draining:
            why = "the server is shutting down" if self.intake.draining else "the sampler is still compiling"
            return native_error(why, 503)
        try:
            async with asyncio.timeout(10):
                await asyncio.wrap_future(self.engine.call(lambda: None))
        except TimeoutError:
            return native_error("the engine has not answered for 10 s", 503)
        return PlainTextResponse("ok\n")

    async def model_info(self, request: Request) -> Response:
        """GET: what is served."""
        return JSONResponse(
            {
                "model_path": self.path,
                "weight_version": self.engine.version,
                "architectures": ["Cohere2MoeForCausalLM"],
                "is_generation": True,
                "has_tokenizer": self.intake.tokenizer is not None,
                "vocab_size": self.engine.config.vocab_size,
                "context_length": self.engine.context,
            }
        )

    async def server_info(self, request: Request) -> Response:
        """GET: size of the server and the engine's counters (Engine.stats)."""
        info = {
            "model_path": self.path,
            "weight_version": self.engine.version,
            "context_length": self.engine.context,
            "max_running_requests": self.engine.slots,
            "max_queued_requests": self.intake.limit - self.engine.slots,
            "open_requests": len(self.intake.tickets),
        }
        return JSONResponse(info | await asyncio.wrap_future(self.engine.stats()))

    async def metrics(self, request: Request) -> Response:
        """GET: Prometheus' text format."""
        stats = await asyncio.wrap_future(self.engine.stats())
        text = self.intake.metrics.text(stats, len(self.intake.tickets), self.engine.version, self.path)
        return Response(text, media_type=CONTENT_TYPE)


def folder_version(path: str | os.PathLike) -> str:
    """The weight version that a checkpoint folder states in north_manifest.json, else the folder's name."""
    path = pathlib.Path(path)
    return str(read_manifest(path).get("weight_version", path.name))


def meta_info(result: Result) -> dict[str, Any]:
    """The `meta_info` of a result, finished or not."""
    finish = None
    if result.finish is not None:
        kind, detail = result.finish
        finish = {"type": kind, {"stop": "matched", "length": "length", "abort": "message"}[kind]: detail}
        if kind == "abort":
            finish |= {"status_code": None, "err_type": None}
    return {
        "id": result.rid,
        "finish_reason": finish,
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": len(result.ids),
        "cached_tokens": result.cached_tokens,
        "weight_version": result.version,
        "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in result.spans],
        "e2e_latency": result.seconds,
        "num_retractions": result.retractions,
    }


def finite(logprob: float) -> float | None:
    """The log-probability as JSON can hold it: weights that are no numbers give null, as SGLang answers it."""
    return logprob if math.isfinite(logprob) else None


def logprob_triples(result: Result) -> list[list]:
    """[log-probability, id, None] of each token: `output_token_logprobs`."""
    return [[finite(p), i, None] for p, i in zip(result.logprobs, result.ids, strict=True)]


def _texts(text: Any) -> tuple[Sequence[str], bool]:
    batch = isinstance(text, list)
    texts = text if batch else [text]
    if not texts or not all(isinstance(each, str) for each in texts):
        raise ValueError("text must be a string or a list of strings")
    return texts, batch


def _verdict(success: bool, message: str, **more: Any) -> Response:
    return JSONResponse({"success": success, "message": message, **more}, status_code=200 if success else 400)
