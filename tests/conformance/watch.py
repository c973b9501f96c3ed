"""Cases that crash the process or never end: which one it was is said, whatever becomes of the process."""
from __future__ import annotations

import faulthandler
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .case import Case, Context

GRACE = 30  # seconds in which a native call may still come back to Python


def report_crashes() -> None:
    """Have a crash print every thread's Python frames on standard error, the case's id among them (`named`)."""
    if not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)


def named(case: Case) -> Callable[[Context], None]:
    """The case's check inside a function that has the case's id for a name: a crash report holds nothing but names."""
    def check(context: Context) -> None:
        case.check(context)
    check.__code__ = check.__code__.replace(co_name=case.id)
    return check


@contextmanager
def at_most(seconds: float | None) -> Iterator[None]:
    """`TimeoutError` inside after so many seconds. Where no Python runs to raise it, all frames are printed and the
    process ends, `GRACE` later."""
    if seconds is None:
        yield
        return

    def late(number: int, frame: Any) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")
    alarm = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=sys.__stderr__)
    if alarm:
        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()
