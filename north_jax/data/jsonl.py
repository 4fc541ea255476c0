"""Append-only files of JSON objects, one a line, that survive the death of their writer."""

import fcntl
import json
import os
from pathlib import Path

import numpy as np


def read_lines(path: str | os.PathLike):
    """The JSON objects of a file, one a line; an unfinished last line is left out.

    Raises ValueError naming file and line of anything else that is not a JSON object.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise ValueError(
                    f"{path}:{number} is damaged (not a JSON object): restore the file from a copy, "
                    "or start in a new workdir"
                )
            yield record


class JsonLines:
    """An append-only file of JSON objects, one a line, open in one process at a time.

    On opening, an unfinished last line is cut off and `note` says so. Raises BlockingIOError when another process has
    the file open.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            message = f"{self.path} is in use by another run: stop that run first, or choose another workdir"
            raise BlockingIOError(error.errno, message) from None
        size = os.fstat(self._file).st_size
        self._end = self._after_last_newline(size)
        self.note = None
        if self._end < size:
            self.cut(self._end)
            self.note = f"{self.path}: dropped an unfinished last line of {size - self._end} bytes"

    def append(self, record: dict, *, sync: bool) -> int:
        """Writes one line, to the device too if `sync`; returns its byte offset. A failed write leaves no trace."""
        line = json.dumps(record, separators=(",", ":"), allow_nan=False, default=_plain).encode() + b"\n"
        offset = self._end
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(self._file, line[written:], offset + written)
            if sync:
                os.fsync(self._file)
        except OSError as error:
            self.cut(offset)
            message = f"{self.path} cannot be extended ({error.strerror}): make room there and run the command again"
            raise OSError(error.errno, message) from error
        self._end += len(line)
        return offset

    def cut(self, offset: int) -> None:
        """Takes back everything from a byte offset on."""
        os.ftruncate(self._file, offset)
        self._end = offset

    def close(self) -> None:
        """Flushes to the device and closes."""
        if self._file is not None:
            os.fsync(self._file)
            os.close(self._file)
            self._file = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _after_last_newline(self, size: int) -> int:
        end = size
        while end > 0:
            start = max(0, end - 65536)
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0


def _plain(value):
    """NumPy scalars as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")
