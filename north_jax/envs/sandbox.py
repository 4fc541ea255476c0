"""A sandbox: a work directory in which untrusted commands and their verifier run, many episodes to one start.

The backends differ in how they start the driver (`driver.py`) as process 1 of an isolated world; all else is here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import posixpath
import socket
import struct
import threading
import time
from pathlib import Path

WORK = "/box"
VAULT = "/run"  # where `verify` lays its files, in a directory made for the one call
SCRATCH = WORK, "/tmp", VAULT, "/dev/shm"  # all that a command can write to
PATH = "/usr/local/bin:/usr/bin:/bin"
ENV = {
    "PATH": PATH,
    "HOME": WORK,
    "USER": "user",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PYTHONDONTWRITEBYTECODE": "1",
}
# The verifier's Python takes no module from the work directory or from a user site unless the verifier asks for it.
VERIFIER_ENV = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
DRIVER = (Path(__file__).with_name("driver.py")).read_bytes()
# Read from standard input, so that `ps` inside shows a short line.
DRIVER_ARGUMENTS = ["-I", "-S", "-c", f"import sys;exec(sys.stdin.buffer.read({len(DRIVER)}))"]

_START_S = 30.0
_FILE_S = 10.0
_GRACE_S = 10.0  # for the driver to end what a command left and to answer


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one sandbox may use. Its files lie in memory and count towards `memory_mib`.

    memory_mib: all processes and files together. pids: processes and threads. cpus: cores. file_mib: largest file.
    box_mib, tmp_mib: the work directory, /tmp. output_bytes: kept of one command's output; more ends the command.
    """

    memory_mib: int = 512
    pids: int = 128
    cpus: float = 1.0
    file_mib: int = 64
    box_mib: int = 64
    tmp_mib: int = 64
    output_bytes: int = 65536


@dataclasses.dataclass(frozen=True)
class CommandResult:
    """How a command ended.

    exit_code: as a shell reports it (128 + signal number; 124 after the time limit; 126 when it could not start).
    output: standard output and error as they came, UTF-8 with replacement. timed_out: ended by its time limit.
    truncated: ended because it wrote more than `Limits.output_bytes`, which is what `output` was cut to.
    """

    exit_code: int
    output: str
    timed_out: bool = False
    truncated: bool = False


class SandboxDied(RuntimeError):
    """The sandbox ended during or before a request; nothing is known of the request's outcome."""


class SandboxUnavailable(RuntimeError):
    """This machine cannot start such a sandbox; the message names the reason and the remedy."""


class Wire:
    """The byte stream to a driver: a socket, or (framed) one with the Docker Engine's eight-byte frame headers."""

    def __init__(self, sock: socket.socket, *, framed: bool = False):
        self.sock, self.framed = sock, framed
        self.stderr = b""
        self._pending = b""

    def send(self, data: bytes, deadline: float) -> None:
        self._limit(deadline)
        self.sock.sendall(data)

    def receive(self, deadline: float) -> dict:
        """The next message. Raises EOFError at the stream's end and TimeoutError at the deadline (time.monotonic)."""
        (size,) = struct.unpack(">I", self._exactly(4, deadline))
        return json.loads(self._exactly(size, deadline))

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def _limit(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self.sock.settimeout(left_s)

    def _raw(self, size: int, deadline: float) -> bytes:
        parts = []
        while size:
            self._limit(deadline)
            part = self.sock.recv(min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _exactly(self, size: int, deadline: float) -> bytes:
        if not self.framed:
            return self._raw(size, deadline)
        while len(self._pending) < size:
            stream, length = struct.unpack(">BxxxI", self._raw(8, deadline))
            data = self._raw(length, deadline)
            if stream == 2:
                self.stderr = (self.stderr + data)[-4096:]
            else:
                self._pending += data
        data, self._pending = self._pending[:size], self._pending[size:]
        return data


class Sandbox:
    """What both backends do; one thread at a time may use it, `stop` is allowed from any.

    Every request leaves no process behind but the driver: what a command starts in the background ends with it. Files
    last until the next `reset`. Each method raises SandboxDied when the sandbox is dead or dies of the request.
    """

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()
        self._wire: Wire | None = None
        self._reason: str | None = "the sandbox was not started"
        self._ids = itertools.count()
        self._busy = threading.RLock()

    # What a backend supplies

    def _launch(self) -> Wire:
        """Start the driver's interpreter; a wire to its standard streams."""
        raise NotImplementedError

    def _kill(self) -> str:
        """End everything that `_launch` began (also when half begun, or twice); what it wrote on standard error."""
        raise NotImplementedError

    def _rlimits(self) -> dict[str, int]:
        """Limits of each process, by the names of the `resource` module without RLIMIT_; asked after `_launch`."""
        return {"CORE": 0, "NOFILE": 1024, "FSIZE": self.limits.file_mib << 20}

    def _scratch(self) -> list[str]:
        """Every directory that a command can write to."""
        return list(SCRATCH)

    # Life

    def start(self) -> Sandbox:
        """Start it; the same object. Raises SandboxUnavailable with reason and remedy when it cannot be started."""
        with self._busy:
            if not self.alive:
                self._start()
        return self

    def _start(self) -> None:
        try:
            self._wire = self._launch()
            config = {
                "work": WORK,
                "vault": VAULT,
                "scratch": self._scratch(),
                "env": ENV,
                "verifier_env": VERIFIER_ENV,
                "output_bytes": self.limits.output_bytes,
                "rlimits": self._rlimits(),
            }
            deadline = time.monotonic() + _START_S
            self._wire.send(DRIVER, deadline)
            self._wire.receive(deadline)
            self._reason = None
            self._request("start", _START_S, config=config)
        except BaseException as error:
            complaint = self._end("it could not be started")
            if isinstance(error, SandboxDied | OSError | EOFError):
                raise SandboxUnavailable(self._explain(complaint or str(error))) from error
            raise

    def _explain(self, complaint: str) -> str:
        return f"the sandbox could not be started: {complaint or 'no reason given'}"

    def stop(self) -> None:
        """End it and all that runs in it; a second call does nothing."""
        self._end("the sandbox was stopped")

    @property
    def alive(self) -> bool:
        return self._reason is None

    def __enter__(self) -> Sandbox:
        return self.start()

    def __exit__(self, *exception) -> None:
        self.stop()

    # Requests

    def reset(self, files: dict[str, str] | None = None) -> None:
        """Empty the work directory and all else that can be written, then lay `files` (relative path to text)."""
        self._request("reset", _FILE_S, files=_confined_all(files or {}))

    def run(self, command: str, timeout_s: float = 10.0) -> CommandResult:
        """`bash -c command` in the work directory, with no input."""
        answer = self._request("run", timeout_s, command=command, timeout_s=timeout_s)
        return CommandResult(**answer)

    def read(self, path: str) -> str | None:
        """The text of a file in the work directory, None when there is no such file.

        Raises ValueError for a path outside or a file that cannot be read (no permission, more than 1 MiB).
        """
        answer = self._request("read", _FILE_S, path=confined(path), timeout_s=_FILE_S)
        if "error" in answer:
            raise ValueError(f"cannot read {path}: {answer['error']}")
        return answer["text"]

    def write(self, path: str, text: str) -> None:
        """Write a file in the work directory, with the directories above it.

        Raises ValueError for a path outside or one that cannot be written (a directory, no room).
        """
        answer = self._request("write", _FILE_S, path=confined(path), text=text, timeout_s=_FILE_S)
        if "error" in answer:
            raise ValueError(f"cannot write {path}: {answer['error']}")

    def verify(self, files: dict[str, str], command: str, timeout_s: float = 10.0) -> CommandResult:
        """Run a verifier: `bash -c command` in the work directory, its files in the fresh directory $VERIFIER_DIR.

        The directory is made after every process of the agent has ended, under a name drawn at that moment, and is
        gone when the call returns. HOME is that directory too. Python takes no module from the work directory, the
        script's directory or a user site by itself (PYTHONSAFEPATH); the command asks with PYTHONPATH where it wants.
        """
        answer = self._request("verify", timeout_s, files=_confined_all(files), command=command, timeout_s=timeout_s)
        return CommandResult(**answer)

    def _request(self, operation: str, allowed_s: float, **arguments) -> dict:
        with self._busy:
            return self._ask(operation, allowed_s, arguments)

    def _ask(self, operation: str, allowed_s: float, arguments: dict) -> dict:
        wire, reason = self._wire, self._reason
        if reason is not None or wire is None:
            raise SandboxDied(reason or "the sandbox was not started")
        number = next(self._ids)
        body = json.dumps({"id": number, "op": operation, "arguments": arguments}).encode()
        deadline = time.monotonic() + allowed_s + _GRACE_S
        try:
            wire.send(struct.pack(">I", len(body)) + body, deadline)
            answer = wire.receive(deadline)
            if answer.pop("id") != number:
                raise ValueError("an answer to another request")
            return answer
        except TimeoutError:
            why = f"the sandbox did not answer '{operation}' within {allowed_s + _GRACE_S:.0f} s and was killed"
        except (EOFError, OSError):
            why = f"the sandbox's driver ended during '{operation}'"
        except (ValueError, KeyError, AttributeError) as error:
            why = f"the sandbox answered '{operation}' with something else than an answer ({error})"
        except BaseException:
            # Interrupted half-way (Ctrl-C): the stream is out of step, so this sandbox is of no more use.
            self._end(f"'{operation}' was interrupted")
            raise
        complaint = self._end(why)
        raise SandboxDied(f"{self._reason}{': ' + complaint if complaint else ''}")

    def _end(self, reason: str) -> str:
        self._reason = self._reason or reason
        wire = self._wire
        if wire is not None:
            wire.hang_up()
        # The socket is closed only when no thread waits on it: its number may be another file's at once, and a thread
        # still polling that number would never wake.
        with self._busy:
            self._reason = self._reason or reason
            wire, self._wire = self._wire, None
            complaint = self._kill().strip()
            if wire is not None:
                complaint = complaint or wire.stderr.decode("utf-8", "replace").strip()
                wire.sock.close()
            return complaint.splitlines()[-1] if complaint else ""


def confined(path: str) -> str:
    """A path relative to the work directory, or ValueError for one that leaves it."""
    relative = path.removeprefix(WORK + "/") if path.startswith(WORK + "/") else path
    normal = posixpath.normpath(relative)
    if not path or "\0" in path or normal.startswith("/") or normal.split("/")[0] == ".." or normal == ".":
        raise ValueError(f"the path {path!r} does not name a file in the work directory {WORK}: use a relative path")
    return normal


def _confined_all(files: dict[str, str]) -> dict[str, str]:
    return {confined(path): text for path, text in files.items()}
