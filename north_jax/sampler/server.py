"""The embedded sampler over HTTP: SGLang's native endpoints and OpenAI's.

python -m north_jax.sampler.server --checkpoint DIR --port 30000 --slots 64 --context 512
"""

import asyncio
import ipaddress
import os
import signal
import socket
import sys
import threading
import time

import jax
import jax.numpy as jnp
import uvicorn
from absl import app, flags
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from north_jax.chat.tokenizer import Tokenizer
from north_jax.model import MOE_KINDS
from north_jax.parallel import make_mesh
from north_jax.sampler.engine import KV_DTYPES, Engine
from north_jax.sampler.http import KeyRequired, error_for
from north_jax.sampler.intake import Intake
from north_jax.sampler.metrics import Metrics
from north_jax.sampler.native import Native, folder_version
from north_jax.sampler.openai import OpenAI
from north_jax.weights import hf

QUEUE = 4096
DRAIN_S = 5.0
KEY_VARIABLE = "NORTH_JAX_API_KEY"
ENGINE_FLAGS = ("moe", "tensor", "expert", "cache_tokens", "kv_dtype", "routed_experts")


class Server:
    """The HTTP face of one engine. `path` is the folder its weights came from.

    At most `queue` requests wait beside those that run; beyond that the answer is 429. With an `api_key` every request
    must carry it. Somebody else starts the engine and sets `intake.ready`.
    """

    def __init__(
        self,
        engine: Engine,
        path: str,
        *,
        tokenizer: Tokenizer | None = None,
        queue: int = QUEUE,
        api_key: str | None = None,
    ):
        self.engine = engine
        self.intake = Intake(engine, tokenizer, Metrics(), engine.slots + queue)
        self.native = Native(self.intake, path)
        self.openai = OpenAI(self.intake, self.native)
        self._api_key = api_key

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [*self.native.routes(), *self.openai.routes()]
        served = _Counted(Starlette(routes=routes, exception_handlers={HTTPException: _no_route}), self.intake.metrics)
        return KeyRequired(served, self._api_key) if self._api_key else served


async def _no_route(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path} is not served here: {error.detail}"
    return error_for(request.url.path)(message, error.status_code, headers=error.headers)


class _Counted:
    """Counts answers that are refusals, by status."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self.app, self._metrics = app, metrics

    async def __call__(self, scope, receive, send) -> None:
        async def counted(message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._metrics.refused[message["status"]] += 1
            await send(message)

        await self.app(scope, receive, counted)


class DrainingServer(uvicorn.Server):
    """uvicorn, which on the first signal to end lets the open requests finish within `drain_s` seconds."""

    def __init__(self, config: uvicorn.Config, intake: Intake, drain_s: float):
        super().__init__(config)
        self.signals: list[int] = []
        self._intake, self._drain_s = intake, drain_s
        self._drain: asyncio.Task | None = None

    def handle_exit(self, sig: int, frame) -> None:
        """A second signal ends it at once."""
        self.signals.append(sig)
        if len(self.signals) > 1:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to end."""
        if self.signals and self._drain is None:
            self._drain = asyncio.ensure_future(self._intake.drain(self._drain_s))
        if self._drain is not None and self._drain.done():
            self.should_exit = True
        return await super().on_tick(counter)


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


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def load_tokenizer(path: str) -> Tokenizer | None:
    """The folder's tokenizer; None where it has none, or (told on standard error) not one of this model family."""
    try:
        return Tokenizer.load(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        print(f"sampler: without a tokenizer, so only token ids are served: {error}", file=sys.stderr, flush=True)
        return None


def serve(
    checkpoint: str,
    host: str,
    port: int,
    slots: int,
    context: int,
    *,
    queue: int = QUEUE,
    drain_s: float = DRAIN_S,
    api_key: str | None = None,
    allow_anyone: bool = False,
    interactive: bool = False,
    moe: str = "auto",
    tensor: int = 1,
    expert: int = 1,
    cache_tokens: int | None = None,
    kv_dtype: str | None = None,
    routed_experts: bool = False,
) -> int:
    """Serve until told to stop; the exit status. Errors: OSError, ValueError with one sentence each.

    On SIGTERM or Ctrl-C no more requests are taken (503), the open ones may finish within `drain_s` seconds and are
    then aborted with the tokens they have. `interactive`, for a person at a terminal: the context is at most what the
    model was configured for, and standard output says how to talk to the server once it is ready. The weights are split
    over `tensor` * `expert` devices; `moe` as for Decoder, the rest as for Engine.
    """
    api_key = api_key or os.environ.get(KEY_VARIABLE) or None
    if not is_loopback(host) and not api_key and not allow_anyone:
        raise ValueError(
            f"on {host} anybody who reaches this machine could use and control the sampler; give an API key (api_key or"
            f" {KEY_VARIABLE}), set allow_anyone, or listen on 127.0.0.1"
        )
    sock = listen(host, port)
    mesh = None if tensor * expert == 1 else make_mesh(tensor=tensor, expert=expert)
    model = hf.load(checkpoint, mesh=mesh, moe=moe)
    eos = model.config.eos_token_id
    eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    if interactive:
        context = min(context, model.config.max_position_embeddings)
    version = folder_version(checkpoint)
    engine = Engine(
        model,
        slots=slots,
        context=context,
        version=version,
        eos_ids=eos_ids,
        cache_tokens=cache_tokens,
        kv_dtype=kv_dtype,
        experts=routed_experts,
    )
    del model  # the engine holds the weights; a swap must be able to free them
    tokenizer = load_tokenizer(checkpoint)
    server = Server(engine, str(checkpoint), tokenizer=tokenizer, queue=queue, api_key=api_key)
    config = uvicorn.Config(server.app(), log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    http = DrainingServer(config, server.intake, drain_s)
    died = threading.Event()

    def run_engine():
        started = time.monotonic()
        try:
            engine.start()
            server.intake.ready = True
            print(f"sampler: ready after {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
            if interactive:
                print(usage(host, port, server.openai.name, bool(api_key)), flush=True)
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
        if signal.SIGINT in http.signals:
            return 130
        return int(died.is_set() or not http.started)
    except KeyboardInterrupt:
        return 130
    finally:
        engine.stop()


def usage(host: str, port: int, name: str, key: bool) -> str:
    """How to talk to the server, for a terminal."""
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    header = f" -H 'Authorization: Bearer '${KEY_VARIABLE}" if key else ""
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return (
        f"serving {name}; Ctrl-C ends it. Try:\n"
        f"  curl {url}/chat/completions{header} -H 'Content-Type: application/json' -d '{body}'\n"
        f"or point any OpenAI client here:\n"
        f"  export OPENAI_BASE_URL={url} OPENAI_API_KEY={f'${KEY_VARIABLE}' if key else 'none'}"
    )


_FLAGS = flags.FLAGS


def _define_flags() -> None:
    flags.DEFINE_string("checkpoint", None, "Hugging Face folder to serve.", required=True)
    flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
    flags.DEFINE_integer("port", 30000, "Port to listen on.", lower_bound=1, upper_bound=65535)
    flags.DEFINE_integer("slots", 64, "Sequences in flight at once.", lower_bound=1)
    flags.DEFINE_integer("context", 512, "Tokens of a sequence, prompt and completion together.", lower_bound=8)
    flags.DEFINE_integer("queue", QUEUE, "Requests that may wait; more are answered 429.", lower_bound=0)
    flags.DEFINE_float("drain_s", DRAIN_S, "Seconds that open requests have when it is told to end.", lower_bound=0)
    flags.DEFINE_string("api_key", None, f"What requests must carry. Better in {KEY_VARIABLE}: ps shows flags.")
    flags.DEFINE_bool("allow_anyone", False, "Serve without an API key on an address that others can reach.")
    flags.DEFINE_enum("moe", "auto", MOE_KINDS, "How experts are computed: all (dense), or the chosen ones (grouped).")
    flags.DEFINE_integer("tensor", 1, "Devices that heads and widths are split over.", lower_bound=1)
    flags.DEFINE_integer("expert", 1, "Devices that experts are split over.", lower_bound=1)
    flags.DEFINE_integer("cache_tokens", None, "Tokens of keys and values in all; slots * context if not given.")
    types = [jnp.dtype(dtype).name for dtype in KV_DTYPES]
    flags.DEFINE_enum("kv_dtype", None, types, "Type of keys and values; the weights' if not given.")
    flags.DEFINE_bool("routed_experts", False, "Keep which experts every token took, for requests that ask for them.")
    flags.DEFINE_bool("stop_with_stdin", False, "End when standard input closes, that is when the parent has ended.")


def main(argv: list[str]) -> int:
    """The command line."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; every option has a name")
    if _FLAGS.stop_with_stdin:
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    try:
        return serve(
            _FLAGS.checkpoint,
            _FLAGS.host,
            _FLAGS.port,
            _FLAGS.slots,
            _FLAGS.context,
            queue=_FLAGS.queue,
            drain_s=_FLAGS.drain_s,
            api_key=_FLAGS.api_key,
            allow_anyone=_FLAGS.allow_anyone,
            **{name: getattr(_FLAGS, name) for name in ENGINE_FLAGS},
        )
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
