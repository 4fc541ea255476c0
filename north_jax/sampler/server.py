"""The embedded sampler over HTTP, with SGLang's native request and answer.

python -m north_jax.sampler.server --checkpoint DIR --port 30000 --slots 64 --context 512
"""

import asyncio
import dataclasses
import json
import math
import os
import pathlib
import socket
import sys
import threading
import time
import uuid
from typing import Any

import jax
import uvicorn
from absl import app, flags
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from north_jax.sampler.engine import Engine, Result
from north_jax.sampler.sampling import Sampling, refuse_unless_neutral
from north_jax.weights import hf

# Fields of SGLang's requests that are accepted only with a value that changes nothing.
_NEUTRAL_GENERATE: dict[str, tuple] = {
    "stream": (False, None),
    "logprob_start_len": (-1, None),
    "top_logprobs_num": (0, None),
    "token_ids_logprob": (None,),
    "return_text_in_logprobs": (False, None),
    "return_routed_experts": (False, None),
    "return_hidden_states": (False, None),
    "return_sampling_mask": (False, None),
    "return_prompt_token_ids": (False, None),
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


@dataclasses.dataclass
class _Open:
    """A request in the engine, and how many connections wait for it."""

    ids: list[int]
    params: dict
    future: Any
    waiters: int = 0


class Server:
    """The HTTP face of one engine. `path` is the folder its weights came from."""

    def __init__(self, engine: Engine, path: str):
        self.engine, self.path = engine, path
        self.ready = threading.Event()
        self._open: dict[str, _Open] = {}
        self._updating = asyncio.Lock()

    def app(self) -> Starlette:
        """The ASGI application; it expects somebody else to start the engine and to set `ready`."""
        control = [
            ("/update_weights_from_disk", self.update_weights_from_disk),
            ("/pause_generation", self.pause_generation),
            ("/continue_generation", self.continue_generation),
            ("/abort_request", self.abort_request),
        ]
        queries = [
            ("/health", self.health),
            ("/ready", self.health),
            ("/model_info", self.model_info),
            ("/server_info", self.server_info),
        ]
        routes = [Route("/generate", _answered(self.generate), methods=["POST"])]
        routes += [Route(path, _answered(handler), methods=["POST"]) for path, handler in control]
        routes += [Route(path, _answered(handler), methods=["GET"]) for path, handler in queries]
        routes += [Route("/flush_cache", _answered(self.flush_cache), methods=["GET", "POST"])]
        return Starlette(routes=routes)

    async def generate(self, request: Request) -> Response:
        """POST /generate: SGLang's native answer {output_ids, meta_info}, a list of them for a batch or n > 1."""
        jobs, as_list, logprobs = _parse_generate(await _body(request))
        if not self.ready.is_set():
            return _error("the sampler is still compiling; wait until /ready answers 200", 503)
        for rid, ids, params, sampling in jobs:
            self.engine.check(ids, sampling)
            if (known := self._open.get(rid)) and (known.ids, known.params) != (ids, params):
                raise ValueError(f"rid {rid!r} belongs to another request that is running; choose a new one")
        futures = []
        for rid, ids, params, sampling in jobs:
            # The same rid and content again is a retry after a lost connection: it joins the running request.
            if rid not in self._open:
                self._open[rid] = _Open(ids, params, self.engine.submit(rid, ids, sampling))
            self._open[rid].waiters += 1
            futures.append(asyncio.wrap_future(self._open[rid].future))
        gone = asyncio.ensure_future(_disconnected(request))
        done = asyncio.gather(*futures)
        try:
            await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                return Response(status_code=499)  # nobody reads it
            answers = [_answer(result, logprobs) for result in done.result()]
        finally:
            gone.cancel()
            done.cancel()
            for rid, *_ in jobs:
                entry = self._open[rid]
                entry.waiters -= 1
                if entry.waiters == 0:
                    del self._open[rid]
                    if not entry.future.done():
                        self.engine.abort(rid)
        return JSONResponse(answers if as_list else answers[0])

    async def update_weights_from_disk(self, request: Request) -> Response:
        """POST: load the Hugging Face folder `model_path` and swap it in between two device calls.

        Running requests go on under the new weights: with `flush_cache` (default) what they have is computed again,
        without it their old keys and values stay. `weight_version` defaults to the folder's own, then to its name.
        A folder that cannot be loaded is a 400, and weights and version stay as they were.
        """
        body = await _body(request)
        path, version = body.pop("model_path", None), body.pop("weight_version", None)
        flush, abort_all = body.pop("flush_cache", True), body.pop("abort_all_requests", False)
        if not isinstance(path, str) or not isinstance(flush, bool) or not isinstance(abort_all, bool):
            raise ValueError("update needs model_path (text); flush_cache and abort_all_requests are true or false")
        refuse_unless_neutral(body, _NEUTRAL_UPDATE)
        async with self._updating:
            try:
                model = await asyncio.to_thread(hf.load, path, self.engine.dtype)
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

    async def pause_generation(self, request: Request) -> Response:
        """POST: `mode` "abort" (default), "retract" or "in_place", as Engine.pause."""
        body = await _body(request)
        mode = body.pop("mode", "abort")
        refuse_unless_neutral(body, {})
        await asyncio.wrap_future(self.engine.pause(mode))
        return JSONResponse({"status": "ok", "message": f"generation is paused, mode {mode}"})

    async def continue_generation(self, request: Request) -> Response:
        """POST: go on after a pause."""
        refuse_unless_neutral(await _body(request), {"torch_empty_cache": (True, False)})
        await asyncio.wrap_future(self.engine.resume())
        return JSONResponse({"status": "ok", "message": "generation goes on"})

    async def abort_request(self, request: Request) -> Response:
        """POST: `rid`, or `abort_all` true. The aborted /generate answers 200 with the tokens it has."""
        body = await _body(request)
        rid, abort_all = body.pop("rid", None), body.pop("abort_all", False)
        refuse_unless_neutral(body, {"abort_message": (None,)})
        if abort_all is not True and (not isinstance(rid, str) or not rid):
            raise ValueError("abort needs rid (text), or abort_all true")
        await asyncio.wrap_future(self.engine.abort(None if abort_all is True else rid))
        return Response(status_code=200)

    async def flush_cache(self, request: Request) -> Response:
        """GET or POST: forget cached prefixes; 400 while requests run."""
        if await asyncio.wrap_future(self.engine.flush()):
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Cache not flushed: requests are running; wait or abort them.\n", status_code=400)

    async def health(self, request: Request) -> Response:
        """GET /health and /ready: 200 when every program is compiled and the engine's loop turns, else 503."""
        if not self.ready.is_set():
            return _error("the sampler is still compiling", 503)
        try:
            async with asyncio.timeout(10):
                await asyncio.wrap_future(self.engine.call(lambda: None))
        except TimeoutError:
            return _error("the engine has not answered for 10 s", 503)
        return PlainTextResponse("ok\n")

    async def model_info(self, request: Request) -> Response:
        """GET: what is served."""
        return JSONResponse(
            {
                "model_path": self.path,
                "weight_version": self.engine.version,
                "architectures": ["Cohere2MoeForCausalLM"],
                "is_generation": True,
                "vocab_size": self.engine.config.vocab_size,
                "context_length": self.engine.context,
            }
        )

    async def server_info(self, request: Request) -> Response:
        """GET: size of the engine and its counters (Engine.stats)."""
        info = {
            "model_path": self.path,
            "weight_version": self.engine.version,
            "context_length": self.engine.context,
            "max_running_requests": self.engine.slots,
        }
        return JSONResponse(info | await asyncio.wrap_future(self.engine.stats()))


def folder_version(path: str | os.PathLike) -> str:
    """The weight version that a checkpoint folder states in north_manifest.json, else the folder's name."""
    path = pathlib.Path(path)
    try:
        return str(json.loads((path / "north_manifest.json").read_text(encoding="utf-8"))["weight_version"])
    except (OSError, ValueError, KeyError, TypeError):
        return path.name


def _parse_generate(body: dict) -> tuple[list[tuple[str, list[int], dict, Sampling]], bool, bool]:
    """(jobs of (rid, ids, raw parameters, parameters), whether the answer is a list, whether it has log-probs)."""
    if "text" in body or "input_embeds" in body:
        raise ValueError("this sampler takes input_ids only: encode the text with the checkpoint's tokenizer")
    if "input_ids" not in body:
        raise ValueError("input_ids is missing")
    ids, params = body.pop("input_ids"), body.pop("sampling_params", None) or {}
    rids, logprobs = body.pop("rid", None), body.pop("return_logprob", False)
    refuse_unless_neutral(body, _NEUTRAL_GENERATE)
    batch = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    prompts = ids if batch else [ids]
    params = params if isinstance(params, list) else [params] * len(prompts)
    if isinstance(rids, str) and batch:
        rids = [f"{rids}_{i}" for i in range(len(prompts))]
    rids = rids if isinstance(rids, list) else [rids] * len(prompts)
    if not len(prompts) == len(params) == len(rids):
        raise ValueError(
            f"{len(prompts)} prompts with {len(params)} sampling_params and {len(rids)} rids; give as many"
        )
    if isinstance(logprobs, list):
        raise ValueError("return_logprob must be true or false for the whole batch")
    jobs = []
    for prompt, fields, rid in zip(prompts, params, rids, strict=True):
        if rid is not None and (not isinstance(rid, str) or not rid):
            raise ValueError(f"rid must be text, not {rid!r}")
        sampling, number = Sampling.from_json(fields)
        rid = rid or uuid.uuid4().hex
        for i in range(number):
            # With one seed for all, n completions would be one completion n times.
            each = dataclasses.replace(sampling, seed=sampling.seed + i)
            jobs.append((rid if number == 1 else f"{rid}_{i}", prompt, fields, each))
    if len({rid for rid, *_ in jobs}) < len(jobs):
        raise ValueError("two requests of the batch have one rid; make them differ")
    return jobs, batch or len(jobs) > 1, bool(logprobs)


def _answer(result: Result, logprobs: bool) -> dict[str, Any]:
    kind, detail = result.finish
    finish = {"type": kind, {"stop": "matched", "length": "length", "abort": "message"}[kind]: detail}
    if kind == "abort":
        finish |= {"status_code": None, "err_type": None}
    meta = {
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
    if logprobs:
        pairs = zip(result.logprobs, result.ids, strict=True)
        meta["output_token_logprobs"] = [[p if math.isfinite(p) else None, i, None] for p, i in pairs]
        meta["output_token_logprobs_length"] = len(result.ids)
    return {"output_ids": result.ids, "meta_info": meta}


def _answered(handler):
    """The handler with its errors as answers: a bad request is a 400, a stopped engine a 503."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except ValueError as error:
            return _error(str(error), 400)
        except RuntimeError as error:
            return _error(str(error), 503)

    return endpoint


def _error(message: str, status: int) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)


def _verdict(success: bool, message: str, **more: Any) -> Response:
    return JSONResponse({"success": success, "message": message, **more}, status_code=200 if success else 400)


async def _body(request: Request) -> dict[str, Any]:
    raw = await request.body()
    try:
        body = json.loads(raw) if raw else {}
    except ValueError as error:
        raise ValueError(f"the request's body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError(f"the request's body must be a JSON object, not {type(body).__name__}")
    return body


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Errors: OSError with one sentence naming the port and the remedy."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise OSError(
            f"cannot listen on port {port} of {host} ({error.strerror});"
            " choose another with --port, or stop what holds it"
        ) from None
    return sock


def serve(checkpoint: str, host: str, port: int, slots: int, context: int) -> int:
    """Serve until told to stop; the exit status. Errors: OSError, ValueError with one sentence each."""
    sock = listen(host, port)
    model = hf.load(checkpoint)
    eos = model.config.eos_token_id
    eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    version = folder_version(checkpoint)
    engine = Engine(model, slots=slots, context=context, version=version, eos_ids=eos_ids)
    server = Server(engine, str(checkpoint))
    config = uvicorn.Config(server.app(), log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    http = uvicorn.Server(config)
    died = threading.Event()

    def run_engine():
        started = time.monotonic()
        try:
            engine.start()
            server.ready.set()
            print(f"sampler: ready after {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
            engine.join()
        except RuntimeError as error:
            print(f"sampler: {error}", file=sys.stderr, flush=True)
            died.set()
        http.should_exit = True

    print(
        f"sampler: {checkpoint} version {version} on http://{host}:{port}, {slots} slots of {context} tokens,"
        f" {jax.default_backend()}; compiling",
        file=sys.stderr,
        flush=True,
    )
    threading.Thread(target=run_engine, daemon=True).start()
    try:
        http.run(sockets=[sock])
        return int(died.is_set() or not http.started)
    except KeyboardInterrupt:
        return 130
    finally:
        engine.stop()


_FLAGS = flags.FLAGS


def _define_flags() -> None:
    flags.DEFINE_string("checkpoint", None, "Hugging Face folder to serve.", required=True)
    flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
    flags.DEFINE_integer("port", 30000, "Port to listen on.", lower_bound=1, upper_bound=65535)
    flags.DEFINE_integer("slots", 64, "Sequences in flight at once.", lower_bound=1)
    flags.DEFINE_integer("context", 512, "Tokens of a sequence, prompt and completion together.", lower_bound=8)
    flags.DEFINE_bool("stop_with_stdin", False, "End when standard input closes, that is when the parent has ended.")


def main(argv: list[str]) -> int:
    """The command line."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; every option has a name")
    if _FLAGS.stop_with_stdin:
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    try:
        return serve(_FLAGS.checkpoint, _FLAGS.host, _FLAGS.port, _FLAGS.slots, _FLAGS.context)
    except (OSError, ValueError) as error:
        print(f"sampler: {error}", file=sys.stderr, flush=True)
        return 1


def _exit_with_stdin() -> None:
    # The parent holds the other end and never writes. However it ends, this read then returns.
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    _define_flags()
    app.run(main)
