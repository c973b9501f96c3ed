"""Bounds on work, not on the clock: a busy machine stretches waiting without end, but computing hardly."""
from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SOON = 120.0  # seconds on the clock until what must happen counts as not happening; nothing is measured by it


@contextmanager
def unencumbered() -> Iterator[None]:
    """What earlier tests left in memory costs what is done inside no garbage collection (a second, after thousands)."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """What is done inside takes less than so many seconds of a processor, over all threads of this process."""
    with unencumbered():
        began = time.process_time()
        yield
        spent = time.process_time() - began
    assert spent < seconds, f"it computed for {spent:.2f} s, at most {seconds:g} s are right"


def until(condition: Callable[[], object], pause: float = 0.01) -> None:
    """Wait for what must happen."""
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, f"it did not happen in {SOON:g} s"
        time.sleep(pause)
