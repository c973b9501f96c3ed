"""A command in a process of its own: what Ctrl-C ends, and how the process is left."""
from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from .main import INTERRUPTED

_notes: list[socket.socket] = []  # both ends of what the system's signals are noted in, as long as no event loop does


def run_process(run: Callable[[Sequence[str]], int]) -> int:
    """Run this process's command; the exit code. Returns only where the interpreter may end in its own way."""
    _note_signals()
    code = INTERRUPTED
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        pass
    finally:  # nothing is left to do that another Ctrl-C should not cut short
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if any(thread.daemon for thread in threading.enumerate()):
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with suppress(OSError, ValueError):  # its reader has gone, or it is closed
                stream.flush()
        os._exit(code)  # a thread in the middle of native code crashes where the interpreter goes away under it
    return code


def cut_off(error: Exception) -> bool:
    """Whether the error comes of an import that Ctrl-C cut off: numpy, for one, then tells of a broken installation."""
    if not _notes or not any(isinstance(each, ImportError) for each in (error, error.__cause__)):
        return False
    with suppress(BlockingIOError):
        return signal.SIGINT in _notes[0].recv(4096)
    return False


def _note_signals() -> None:
    _notes.extend(socket.socketpair())
    for end in _notes:
        end.setblocking(False)
    signal.set_wakeup_fd(_notes[1].fileno(), warn_on_full_buffer=False)
