"""A sampling server in a process of its own, watched and started again when it dies."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

TAIL_LINES = 5
ROOT = pathlib.Path(__file__).parents[2]
# SGLang takes prompts of fewer tokens than its context less 6, and completes up to its context less 2.
SGLANG_SPARE = 6


def _embedded(checkpoint: str, host: str, port: int, slots: int, context: int) -> list[str]:
    options = {"checkpoint": checkpoint, "host": host, "port": port, "slots": slots, "context": context}
    command = [sys.executable, "-m", "north_jax.sampler.server", "--stop_with_stdin", "--routed_experts"]
    return command + [f"--{name}={value}" for name, value in options.items()]


def _sglang_python() -> pathlib.Path:
    return ROOT / ".venv-sglang" / "bin" / "python"


def _sglang(checkpoint: str, host: str, port: int, slots: int, context: int) -> list[str]:
    config = pathlib.Path(checkpoint, "config.json")
    if config.is_file() and context > (most := json.loads(config.read_text()).get("max_position_embeddings", context)):
        raise RuntimeError(f"a context of {context} is longer than {checkpoint}'s {most} positions; use a shorter one")
    options = {
        "model-path": checkpoint,
        "host": host,
        "port": port,
        "max-running-requests": slots,
        "context-length": context + SGLANG_SPARE,
    }
    launcher = pathlib.Path(__file__).with_name("sglang") / "launch.py"
    command = [os.fspath(_sglang_python()), os.fspath(launcher), "--stop-with-stdin", "--skip-tokenizer-init"]
    command += ["--enable-return-routed-experts"]  # each request still has to ask for them
    return command + [f"--{name}={value}" for name, value in options.items()]


_COMMANDS = {"embedded": _embedded, "sglang": _sglang}


class SamplerProcess:
    """A sampling server as a child of this process; its output is appended to workdir/sampler.log.

    `kind` "embedded" is `python -m north_jax.sampler.server`; "sglang" is SGLang's server with North's model, in the
    environment that `make sglang` makes. The server has its own session, so Ctrl-C in the terminal does not reach it,
    and it ends when this process ends, however that happens. `checkpoint` is the folder that the next start serves:
    whoever exports newer weights sets it. Without a `port` a free one is chosen at the first start and kept. All
    methods are safe from any thread. Errors: ValueError for an unknown kind, or without that environment.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike,
        workdir: str | os.PathLike,
        *,
        kind: str = "embedded",
        slots: int = 64,
        context: int = 512,
        port: int | None = None,
        host: str = "127.0.0.1",
        timeout_s: float = 300.0,
        env: dict[str, str] | None = None,
    ):
        if kind not in _COMMANDS:
            raise ValueError(f"sampler kind {kind!r} is not known; use one of {', '.join(_COMMANDS)}")
        if kind == "sglang" and not _sglang_python().exists():
            raise ValueError(f"{_sglang_python()} does not exist; run `make sglang`, which installs SGLang there")
        self.checkpoint, self.kind = checkpoint, kind
        self.log = pathlib.Path(workdir) / "sampler.log"
        self.slots, self.context, self.port, self.host, self.timeout_s = slots, context, port, host, timeout_s
        self.starts = 0
        self._env = env or {}
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Where it listens. Errors: RuntimeError before the first start of one without a given port."""
        if self.port is None:
            raise RuntimeError("the sampler has no port yet; start it first")
        return f"http://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The process id of the running server."""
        return self._process.pid if self.alive else None

    def start(self) -> None:
        """Start it and wait until it is ready. Errors: RuntimeError, one sentence with the end of its log."""
        with self._lock:
            self._start()

    def ensure_alive(self) -> bool:
        """Start it again, with the present `checkpoint`, if it has died. Whether that was needed."""
        with self._lock:
            if self.alive:
                return False
            self._start()
            return True

    def stop(self) -> None:
        """End it: asked first, killed after 10 seconds."""
        with self._lock:
            self._stop()

    def __enter__(self) -> "SamplerProcess":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def _start(self) -> None:
        if self.alive:
            raise RuntimeError(f"the sampler already runs as process {self._process.pid}; stop it first")
        self._stop()
        if self.port is None:
            with socket.socket() as probe:
                probe.bind((self.host, 0))
                self.port = probe.getsockname()[1]
        command = _COMMANDS[self.kind](os.fspath(self.checkpoint), self.host, self.port, self.slots, self.context)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        with self.log.open("ab") as log:
            began = log.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # its end of this pipe closes with us, and tells it to go
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # SGLANG_SPARE may reach beyond the model's positions; no token does.
                env={**os.environ, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1", **self._env},
            )
        deadline = time.monotonic() + self.timeout_s
        while not self._ready():
            status = self._process.poll()
            if status is not None or time.monotonic() > deadline:
                what = f"was not ready within {self.timeout_s:g} s" if status is None else f"ended with status {status}"
                self._stop()
                raise RuntimeError(f"the sampler {what}; {self.log} ends with: {self._tail(began)}")
            time.sleep(0.05)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5.0) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdin.close()

    def _tail(self, began: int) -> str:
        with self.log.open("rb") as log:
            log.seek(began)
            lines = log.read().decode(errors="replace").strip().splitlines()
        return " | ".join(lines[-TAIL_LINES:]) or "nothing"
