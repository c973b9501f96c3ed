"""A command in a process of its own: what Ctrl-C ends, and how the process is left."""
from __future__ import annotations

import _thread
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from .main import INTERRUPTED

_notes: list[socket.socket] = []  # both ends of what the system's signals are noted in, as long as no event loop does


def run_process(run: Callable[[Sequence[str]], int]) -> int:
    """Run this process's command; the exit code. Returns only where the interpreter may end in its own way."""
    _note_signals()
    sys.unraisablehook = _interrupt_again
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


def _interrupt_again(lost: Any) -> None:
    """A Ctrl-C that came in a callback, such as those of the locks of imports, is lost there: it comes again."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
    elif sys.platform == "win32":
        _thread.start_new_thread(_thread.interrupt_main, ())
    else:  # a signal also ends what the main thread waits for by then
        _thread.start_new_thread(signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))


def _note_signals() -> None:
    _notes.extend(socket.socketpair())
    for end in _notes:
        end.setblocking(False)
    signal.set_wakeup_fd(_notes[1].fileno(), warn_on_full_buffer=False)
