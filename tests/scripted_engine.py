"""A sampling engine that replays written completions, and a server over it or any engine in this process.

Scripted is one thing only: which token comes next. Everything between the wire and the token ids is the real server,
template, tokenizer and parser. It has the interface of north_jax.sampler.engine.Engine.
"""

import concurrent.futures
import contextlib
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
import uvicorn

from north_jax.sampler.engine import COUNTERS, PAUSE_MODES, Result
from north_jax.sampler.server import DrainingServer, Server, listen


class ScriptedEngine:
    """`script(prompt ids)` gives the ids of the completion; they come `chunk` at a time, every `pause_s` seconds."""

    dtype, version = jnp.float32, "scripted"

    def __init__(self, config, script: Callable[[list[int]], list[int]], *, context: int, chunk=3, pause_s=0.0):
        self.config, self.context, self.slots, self.experts = config, context, 4, True
        self.requests: list[tuple[list[int], object]] = []
        self._script, self._chunk, self._pause_s = script, chunk, pause_s
        self._messages: queue.Queue = queue.Queue()
        self._open: dict[str, dict] = {}
        self._paused = self._stopped = False
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def start(self):
        self._thread.start()

    def stop(self):
        self.call(lambda: setattr(self, "_stopped", True))
        self._thread.join()

    def join(self):
        self._thread.join()

    @property
    def alive(self):
        return self._thread.is_alive()

    def call(self, function):
        future = concurrent.futures.Future()
        self._messages.put((function, future))
        return future

    def check(self, ids, sampling):
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise ValueError("input_ids must be a non-empty list of whole numbers")
        if bad := [i for i in ids if not 0 <= i < self.config.vocab_size]:
            raise ValueError(f"token id {bad[0]} in input_ids is outside the vocabulary of {self.config.vocab_size}")
        if len(ids) >= self.context:
            raise ValueError(f"the prompt of {len(ids)} tokens leaves no room in the context of {self.context} tokens")

    def submit(self, rid, ids, sampling, listener=None):
        self.check(ids, sampling)
        future, most = concurrent.futures.Future(), min(sampling.max_new_tokens, self.context - len(ids))
        reply = list(self._script(ids))
        finish = ("stop", reply[-1]) if len(reply) <= most else ("length", most)
        request = {"rid": rid, "prompt": ids, "ids": reply[:most], "finish": finish, "at": 0, "future": future}
        self.requests.append((ids, sampling))
        self.call(lambda: self._open.update({rid: request | {"listener": listener, "born": time.monotonic()}}))
        return future

    def abort(self, rid):
        return self.call(lambda: [self._end(r, ("abort", "Aborted")) for r in list(self._open) if rid in (None, r)])

    def pause(self, mode):
        if mode not in PAUSE_MODES:
            raise ValueError(f"pause mode {mode!r} is not known")
        if mode == "abort":
            self.abort(None)
        return self.call(lambda: setattr(self, "_paused", True))

    def resume(self):
        return self.call(lambda: setattr(self, "_paused", False))

    def flush(self):
        return self.call(lambda: not self._open)

    def swap(self, model, version, *, flush_cache=True):
        return self.call(lambda: setattr(self, "version", version))

    def stats(self):
        now = {"running": len(self._open), "queue_length": 0, "paused": self._paused, "compilations": 0}
        return self.call(lambda: dict.fromkeys(COUNTERS, 0) | now)

    def _result(self, request, finish):
        ids = request["ids"][: request["at"]]
        shape = (len(request["prompt"]) + len(ids) - 1, 2, 1)
        return Result(
            rid=request["rid"],
            prompt_tokens=len(request["prompt"]),
            ids=ids,
            logprobs=[-0.25 * (i + 1) for i in range(len(ids))],
            spans=[(self.version, 0, len(ids))] if ids else [],
            finish=finish,
            cached_tokens=1,
            retractions=0,
            version=self.version,
            seconds=time.monotonic() - request["born"],
            experts=np.arange(np.prod(shape), dtype=np.int32).reshape(shape),
        )

    def _end(self, rid, finish):
        request = self._open.pop(rid)
        request["future"].set_result(self._result(request, finish))

    def _loop(self):
        while not self._stopped:
            with contextlib.suppress(queue.Empty):
                while True:
                    function, future = self._messages.get(timeout=0.0005 if self._open else 0.05)
                    future.set_result(function())
            for rid, request in list(self._open.items()) if not self._paused else ():
                request["at"] = min(request["at"] + self._chunk, len(request["ids"]))
                if request["at"] == len(request["ids"]):
                    self._end(rid, request["finish"])
                elif request["listener"] is not None:
                    request["listener"](self._result(request, None))
            time.sleep(self._pause_s if self._open else 0)
        for rid in list(self._open):
            self._end(rid, ("abort", "Aborted"))


@contextlib.contextmanager
def serving(engine, path, *, drain_s=0.5, **options) -> Iterator[tuple[str, Server, DrainingServer]]:
    """(URL, server, HTTP server) of the engine, started here and served in a thread until the block ends."""
    server = Server(engine, str(path), **options)
    sock = listen("127.0.0.1", 0)
    config = uvicorn.Config(server.app(), log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    http = DrainingServer(config, server.intake, drain_s)
    engine.start()
    server.intake.ready = True
    thread = threading.Thread(target=http.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", server, http
    finally:
        http.should_exit = True
        thread.join(10)
        engine.stop()
        assert not thread.is_alive()


def turn(chat, **message):
    """The ids that a model which writes this turn would draw."""
    start = len(chat.render([], generation_prompt=True).ids)
    return chat.render([{"role": "assistant", **message}]).ids[start:]


class Script:
    """What the engine says next, set by each test."""

    reply: list[int]

    def __call__(self, prompt):
        return self.reply


def ask(url, path, body=None, *, raw=None, headers=()):
    """(status, answer, headers)."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data=data, headers=dict(headers))) as answer:
            status, text, got = answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            status, text, got = error.code, error.read().decode(), error.headers
    try:
        return status, json.loads(text), got
    except ValueError:
        return status, text, got


def events(url, path, body):
    """The events of a stream; the last line must be [DONE]."""
    request = urllib.request.Request(url + path, data=json.dumps(body | {"stream": True}).encode())
    with urllib.request.urlopen(request) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.read().decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]
