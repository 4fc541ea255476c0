"""Sandboxes lent to threads, dead ones replaced."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from north_jax.envs.sandbox import Sandbox


class SandboxPool:
    """At most `size` sandboxes made by `make`, started when first needed; safe to use from many threads.

    starts: how many were started so far, replacements included.
    """

    def __init__(self, make: Callable[[], Sandbox], size: int):
        if size < 1:
            raise ValueError(f"a sandbox pool needs at least one sandbox, not {size}")
        self._make, self.size = make, size
        self.starts = 0
        self._idle: list[Sandbox] = []
        self._lent: set[Sandbox] = set()
        self._starting = 0
        self._closed = False
        self._changed = threading.Condition()

    def acquire(self, timeout_s: float | None = None) -> Sandbox:
        """A live sandbox for this caller alone; it may still hold the last episode's files, so `reset` it.

        Waits while all are lent. Raises TimeoutError after `timeout_s`, RuntimeError when the pool is closed,
        SandboxUnavailable when none can be started.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._closed:
                    raise RuntimeError("the sandbox pool is closed")
                while self._idle:
                    sandbox = self._idle.pop()
                    if sandbox.alive:
                        self._lent.add(sandbox)
                        return sandbox
                    sandbox.stop()
                if len(self._lent) + self._starting < self.size:
                    self._starting += 1
                    break
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise TimeoutError(f"no sandbox became free within {timeout_s} s: all {self.size} are lent")
                self._changed.wait(left_s)
        sandbox = None
        try:
            sandbox = self._make().start()
        finally:
            with self._changed:
                self._starting -= 1
                if sandbox is not None:
                    self.starts += 1
                    if not self._closed:
                        self._lent.add(sandbox)
                self._changed.notify_all()
        if sandbox not in self._lent:
            sandbox.stop()
            raise RuntimeError("the sandbox pool is closed")
        return sandbox

    def release(self, sandbox: Sandbox) -> None:
        """Give one back, dead or alive."""
        with self._changed:
            self._lent.discard(sandbox)
            keep = sandbox.alive and not self._closed
            if keep:
                self._idle.append(sandbox)
            self._changed.notify_all()
        if not keep:
            sandbox.stop()

    @contextlib.contextmanager
    def lend(self) -> Iterator[Sandbox]:
        """`acquire` and `release` as a with-block."""
        sandbox = self.acquire()
        try:
            yield sandbox
        finally:
            self.release(sandbox)

    def close(self) -> None:
        """Stop all, lent ones too: their users get SandboxDied, those who wait in `acquire` RuntimeError."""
        with self._changed:
            self._closed = True
            sandboxes = [*self._idle, *self._lent]
            self._idle.clear()
            self._lent.clear()
            self._changed.notify_all()
        for sandbox in sandboxes:
            sandbox.stop()

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *exception) -> None:
        self.close()
