"""The entry point `isthmus`. Ctrl-C ends it without a word from here on: all that takes time is imported inside."""
from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # `typing` is among what takes time
if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130  # as shells say that SIGINT ended a program


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 failed, 2 a deliberate error told in one line, 130 interrupted.

    argv: None = this process is the command's own, with its words, and ends with it.
    """
    try:
        if argv is None:
            _leave_at_once()
        from .process import run_process
        from .run import run
        return run_process(run) if argv is None else run(argv)
    except KeyboardInterrupt:
        return INTERRUPTED


def _leave_at_once() -> None:
    """Ctrl-C ends the process, with nothing tidied up, while modules are imported. An exception would not do: raised in
    a callback of the import's locks it is lost, and in the start of native code it crashes."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is not ignored, as in the background
        signal.signal(signal.SIGINT, _leave)


def interruptible() -> None:
    """What a command needs is imported: Ctrl-C raises KeyboardInterrupt from here on."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
