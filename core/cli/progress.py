"""Progress while a model is fetched and loaded: one live line on a terminal, plain lines elsewhere."""
from __future__ import annotations

import sys
import time
from typing import TextIO

from ..config import shown_size
from ..logs import announce

BYTES = 1_000_000  # from this total on, numbers are taken for bytes
SETTLED_S = 1.0    # before that a speed says nothing


class ProgressLine:
    """Called with (stage, done, total); total 0 or None = unknown. Used in a `with`, so that the line is cleared."""

    def __init__(self, stream: TextIO = sys.stderr, live: bool | None = None):
        self.stream = stream
        self.live = stream.isatty() if live is None else live
        self._stage, self._since, self._bar, self._task = "", time.monotonic(), None, None

    def __enter__(self) -> ProgressLine:
        if self.live:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn
            # Redirected, what others print would be wrapped, and a path in it could not be copied.
            self._bar = Progress(TextColumn("{task.description}"), BarColumn(12), TextColumn("{task.fields[amount]}"),
                                 transient=True, console=Console(file=self.stream, force_terminal=True),
                                 redirect_stdout=False, redirect_stderr=False)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int = 0, total: int | None = 0) -> None:
        fresh, self._stage = stage != self._stage, stage
        if fresh:
            self._since = time.monotonic()
        if self._bar is None:
            if fresh:
                amount = f", {shown_size(total)}" if total and total >= BYTES else ""
                announce(f"isthmus: {stage}{amount} ...", stream=self.stream)
            return
        if fresh and self._task is not None:
            self._bar.remove_task(self._task)
        if fresh:
            self._task = self._bar.add_task(stage, total=total or None, amount="")
        self._bar.update(self._task, completed=done, total=total or None, amount=self._amount(done, total or 0))

    def _amount(self, done: int, total: int) -> str:
        if not total:
            return shown_size(done) if done >= BYTES else ""
        if total < BYTES:
            return f"{done}/{total}"
        if not done:
            return shown_size(total)
        whole, part = shown_size(total), shown_size(done)
        text = f"{part.removesuffix(whole[-4:])} of {whole}"  # "45 of 93 MiB"
        spent = time.monotonic() - self._since
        if done < BYTES or spent < SETTLED_S:
            return text
        speed = done / spent
        return f"{text}, {shown_size(speed)}/s" + (f", {(total - done) / speed:.0f} s left" if done < total else "")
