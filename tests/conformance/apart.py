"""A run in a process of its own: whatever a platform does to that one, the command ends with a verdict that was given.

The parent hands the order over as one line of JSON and keeps the pipe open; the child ends when it is closed.
"""
from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import Console

from ..core.discovery import choose_platform
from ..core.errors import IsthmusError, said
from ..core.logs import announce
from ..core.platform import Unavailable
from ..core.registry import RegistrationError
from .report import Outcome, Report, Result
from .runner import Refused, run_suite
from .terminal import ProgressBar, show
from .watch import report_crashes

HOLDS, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130  # exit codes
LAST_WORDS = 10  # seconds that a child has after Ctrl-C, which it gets too


class Order(msgspec.Struct, frozen=True):
    """What is to be run, as `run_suite` has it, and where its report goes; paths are absolute. path: Python's."""

    platform: str
    options: dict[str, str]
    only: list[str]
    seed: int
    limit: float
    verbose: bool
    json: str | None
    markdown: str | None
    path: list[str]


def run_apart(order: Order) -> int:
    """Run the suite in a child process: the exit code, `HOLDS` only if the child gave it as its verdict. SIGTERM ends
    the run as Ctrl-C does."""
    for file in filter(None, (order.json, order.markdown)):
        if Path(file).is_file():  # of a run that ends early there is no report, least of all an older one
            Path(file).unlink()
    with tempfile.TemporaryDirectory(prefix="isthmus-") as folder:
        note = Path(folder, "note")
        child = subprocess.Popen([sys.executable, "-P", "-m", __name__, str(note)], stdin=subprocess.PIPE,
                                 close_fds=False)  # as a report may go to /dev/fd/N
        with child, _terminated():
            try:
                child.stdin.write(msgspec.json.encode(order) + b"\n")
                child.stdin.flush()
                code = child.wait()
            except BrokenPipeError:
                code = child.wait()
            except KeyboardInterrupt:
                code = _last_words(child)
        told = note.read_text("utf-8") if note.is_file() else "before the first case"
    if told == f"verdict {code}":
        return code
    how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
    announce(f"isthmus: the process of platform {order.platform!r} was ended {how} {told}: nothing is shown, and there "
             "is no report", logging.ERROR)
    return FAILED


def _last_words(child: subprocess.Popen[bytes]) -> int:
    if sys.platform != "win32":  # there it has had Ctrl-C too, and would be killed
        child.terminate()
    try:
        return child.wait(LAST_WORDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        child.kill()
        return child.wait()


def main(note: Path) -> None:
    """The child. It never comes back: threads that a platform left, and what it does at exit, are not waited for."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, _interrupted)
    # The platform may close standard output: what the verdict needs are files of its own.
    output, errors = _own(1, sys.stdout), _own(2, sys.stderr)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    threading.Thread(target=_end_with_parent, args=(os.dup(0),), daemon=True).start()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.path[:] = order.path
    try:
        code = _run(order, note, output, errors)
    except RegistrationError as error:  # the platform's own mistake, which is no reason to be let off
        code = _told(error, FAILED, errors)
    except (Refused, ValueError, Unavailable, IsthmusError) as error:
        code = _told(error, REFUSED, errors)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BaseException:
        traceback.print_exc(file=errors)
        code = FAILED
    note.write_text(f"verdict {code}", "utf-8")
    os._exit(code)


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM is `KeyboardInterrupt` inside."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _interrupted(number: int, frame: Any) -> None:
    """`KeyboardInterrupt`, once: it may be sent to this process and to its parent, which passes it on."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _own(descriptor: int, stream: TextIO | None) -> TextIO:
    try:
        return open(os.dup(descriptor), "w", encoding=stream and stream.encoding, errors="replace", buffering=1)
    except OSError:  # it was closed from the start
        return open(os.devnull, "w")


def _end_with_parent(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os._exit(FAILED)


def _told(error: BaseException, code: int, stream: TextIO) -> int:
    announce(f"isthmus: {said(error)}", logging.ERROR, stream)
    return code


def _run(order: Order, note: Path, output: TextIO, errors: TextIO) -> int:
    name = choose_platform(order.options)[0] if order.platform == "auto" else order.platform
    report_crashes()
    with ProgressBar(order.verbose) as bar:
        report = run_suite(name, order.options, only=order.only, seed=order.seed, limit=order.limit,
                           progress=_noted(note, bar))
    for each in (signal.SIGINT, signal.SIGTERM):  # what there is to tell is told
        signal.signal(each, signal.SIG_IGN)
    written = _written(errors, "standard output", partial(_shown, report, output))
    for path, text in ((order.json, report.as_json), (order.markdown, report.as_markdown)):
        if path:
            written &= _written(errors, path, partial(_write, Path(path), text))
    if report.interrupted:
        return INTERRUPTED
    if report.counts()[Outcome.UNAVAILABLE]:
        return REFUSED
    if not report.ok:
        return FAILED
    return HOLDS if written else REFUSED


def _noted(note: Path, bar: ProgressBar) -> Callable[[int, int, Result | None, str], None]:
    """Progress that is also written down, since the case may be the last."""
    def progress(done: int, total: int, last: Result | None, following: str) -> None:
        note.write_text(f"in case {done + 1} of {total}, {following}" if following else "after the last case", "utf-8")
        bar(done, total, last, following)
    return progress


def _shown(report: Report, output: TextIO) -> None:
    show(report, Console(file=output, highlight=False))
    output.flush()


def _write(path: Path, text: Callable[[], str]) -> None:
    path.write_text(text(), "utf-8", "backslashreplace")


def _written(errors: TextIO, where: str, write: Callable[[], Any]) -> bool:
    try:
        write()
    except (OSError, ValueError) as error:
        announce(f"isthmus: the report cannot be written to {where}: {error}", logging.ERROR, errors)
        return False
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]))
