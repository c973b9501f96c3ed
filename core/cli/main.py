"""The entry point `isthmus`. Ctrl-C ends it without a word from here on: all that takes time is imported inside."""
from __future__ import annotations

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
        from .process import run_process
        from .run import run
        return run_process(run) if argv is None else run(argv)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
