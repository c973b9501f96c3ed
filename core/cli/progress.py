"""Progress while a model is fetched and loaded: one live line on a terminal, plain lines elsewhere."""
from __future__ import annotations

import sys
import time
from typing import TextIO

from ..logs import announce

BYTES = 1_000_000  # from this total on, numbers are taken for bytes


def size(n: float) -> str:
    """Bytes for people: "1.25 GB", "84 MB"."""
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"


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
            self._bar = Progress(TextColumn("{task.description}"), BarColumn(12), TextColumn("{task.fields[amount]}"),
                                 transient=True, console=Console(file=self.stream, force_terminal=True))
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
                amount = f", {size(total)}" if total and total >= BYTES else ""
                announce(f"isthmus: {stage}{amount} ...", stream=self.stream)
            return
        if fresh and self._task is not None:
            self._bar.remove_task(self._task)
        if fresh:
            self._task = self._bar.add_task(stage, total=total or None, amount="")
        self._bar.update(self._task, completed=done, total=total or None, amount=self._amount(done, total or 0))

    def _amount(self, done: int, total: int) -> str:
        if not total:
            return size(done) if done >= BYTES else ""
        if total < BYTES:
            return f"{done}/{total}"
        speed = done / max(time.monotonic() - self._since, 0.1)
        left = f", {(total - done) / speed:.0f} s left" if speed and done < total else ""
        part = size(done).removesuffix(size(total)[-3:])  # "45 of 93 MB"
        return f"{part} of {size(total)}, {size(speed)}/s{left}"
