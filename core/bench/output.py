"""What a process says, taken all the time so that nothing holds it up, and kept as far as it may be asked for."""
from __future__ import annotations

import os
import selectors
import threading
import time
from typing import IO

from ..errors import cut, printable

LINES = 1000         # first ones, which are kept with their times
LINE = 2000          # bytes of one
TAIL = 2000          # characters of the end that are shown
READ, READS = 2**16, 64  # bytes that are taken at once, and how often at most while somebody waits
PIPES_BLOCK = os.name != "posix"


class Output:
    """lines: (seconds since `began`, line), the first ones that are not blank. stream: the reading end of a pipe, which
    is closed when the writing end is."""

    def __init__(self, stream: IO[bytes], began: float):
        self._stream, self._began, self._lock = stream, began, threading.Lock()
        self.lines: list[tuple[float, str]] = []
        self._line = self._tail = b""
        self._ended = False
        if not PIPES_BLOCK:
            os.set_blocking(stream.fileno(), False)
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def take(self) -> None:
        """Take what has come by now."""
        if not PIPES_BLOCK:
            self._take()

    def said(self) -> str:
        """The end of what was written."""
        self.take()
        return cut(printable(self._tail.decode(errors="replace")[-TAIL:]).strip(), TAIL) or "it said nothing"

    def _run(self) -> None:
        with self._stream, selectors.DefaultSelector() as waiting:
            if not PIPES_BLOCK:
                waiting.register(self._stream, selectors.EVENT_READ)
            while not self._ended:
                if not PIPES_BLOCK:
                    waiting.select()
                self._take(1)

    def _take(self, reads: int = READS) -> None:
        with self._lock:
            for _ in range(reads):
                try:
                    data = b"" if self._ended else os.read(self._stream.fileno(), READ)
                except BlockingIOError:
                    return
                if not data:
                    self._ended = True
                    return
                self._note(data, time.monotonic() - self._began)

    def _note(self, data: bytes, now: float) -> None:
        self._tail = (self._tail + data)[-4 * TAIL:]  # a character may have so many bytes
        if len(self.lines) == LINES:
            return
        *whole, self._line = (self._line + data).split(b"\n")
        self._line = self._line[:LINE]
        told = (printable(line[:LINE].decode(errors="replace")) for line in whole if line.strip())
        self.lines = [*self.lines, *((now, line) for line in told)][:LINES]
