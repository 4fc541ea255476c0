"""Ctrl-C, and the SIGTERM of a scheduler that wants the machine back, between steps instead of within one."""

import contextlib
import signal
import threading
from collections.abc import Iterator

import jax

from north_jax.parallel import processes

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Whether the run was told to stop."""

    def __init__(self):
        self.event = threading.Event()  # of this process
        self._before: jax.Array | None = None

    def agreed(self) -> bool:
        """Whether to stop now: the same answer on all processes, each of which asks once a step.

        Of several it is what any of them knew at the step before, so that no process waits for the others' devices.
        """
        if jax.process_count() == 1:
            return self.event.is_set()
        before, self._before = self._before, processes.any_of_all(self.event.is_set())
        return before is not None and bool(before)


@contextlib.contextmanager
def interrupts() -> Iterator[Interrupt]:
    """Within the block SIGINT and SIGTERM set the event of what is yielded; a SIGINT after either acts as ever.

    One that came too late for a step acts after the block as ever.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield interrupt
        return
    came: list[int] = []

    def handle(number, frame):
        if came and number == signal.SIGINT:  # schedulers repeat a SIGTERM
            raise KeyboardInterrupt
        came.append(number)
        interrupt.event.set()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])
