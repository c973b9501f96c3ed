"""Sockets and start-up of the worker processes: what the three of them agree on."""
from __future__ import annotations

import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ..config import Config
from ..env import debug_level
from ..errors import encodable
from ..logs import set_up_logging
from ..messages import Failed, ToApi, ToDetokenizer, ToScheduler

HIGH_WATER_MARK = 4096  # messages that may wait in one direction; a full socket blocks or refuses its sender
LINGER_MS = 5000        # how long a failed worker may deliver its last words
SPOKE = 70              # exit code of a worker that did (sysexits.h: EX_SOFTWARE)
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # what a terminal or a service manager sends to a whole group
REPORT = b"?"           # on a worker's standard input: log where you are

log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
decode_to_scheduler = msgspec.msgpack.Decoder(ToScheduler).decode
decode_to_detokenizer = msgspec.msgpack.Decoder(ToDetokenizer).decode
decode_to_api = msgspec.msgpack.Decoder(ToApi).decode


def encode(message: Any) -> bytes:
    """A message as it travels. A text in it that has no encoding, such as a foreign library's words about a client's
    half of a character, must end nobody: the halves become U+FFFD."""
    try:
        return _encode(message)
    except UnicodeEncodeError:
        return _encode(_mended(msgspec.to_builtins(message, builtin_types=(bytes,))))


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list | tuple):
        return [_mended(each) for each in value]
    if isinstance(value, dict):
        return {_mended(key): _mended(each) for key, each in value.items()}
    return value


class Start(msgspec.Struct, frozen=True):
    """The first line on a worker's standard input, as JSON. The pipe stays open: its end means that the parent is gone.

    directory: holds the sockets.  parent: its process id.  engine, tokenizer: "module:attribute" of replacements.
    """

    directory: str
    parent: int
    config: Config
    engine: str | None = None
    tokenizer: str | None = None


def address(directory: str | Path, role: str) -> str:
    """Where the process with this role ("api", "scheduler", "detokenizer") reads."""
    return f"ipc://{Path(directory) / role}"


def open_socket(context: zmq.Context, kind: int) -> zmq.Socket:
    """A bounded PUSH or PULL socket."""
    socket = context.socket(kind)
    socket.set_hwm(HIGH_WATER_MARK)
    socket.linger = LINGER_MS
    return socket


def read_socket(context: zmq.Context, directory: str | Path, role: str) -> zmq.Socket:
    """The socket on which `role` receives from everybody."""
    socket = open_socket(context, zmq.PULL)
    socket.bind(address(directory, role))
    return socket


def write_socket(context: zmq.Context, directory: str | Path, role: str) -> zmq.Socket:
    """A socket that sends to `role`, which may bind later."""
    socket = open_socket(context, zmq.PUSH)
    socket.connect(address(directory, role))
    return socket


def resolve(target: str) -> Any:
    """The object that "module:attribute" names."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def describe(error: BaseException) -> str:
    """One line for people: deliberate errors speak for themselves, others need their type."""
    deliberate = type(error).__module__.startswith(__package__.partition(".")[0])
    return encodable(str(error) if deliberate and str(error) else f"{type(error).__name__}: {error}")


class Report:
    """What a worker logs when it is asked where it is. tail: more words; save: what it does before it leaves. Both are
    from its body and called by other threads."""

    def __init__(self) -> None:
        self.tail: Callable[[], str] = str
        self.save: Callable[[], None] = bool

    def __call__(self) -> None:
        log.error("%s", "\n".join(filter(None, [self.tail(), stacks()])))


def stacks() -> str:
    """Where every thread of this process is, for people."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame)).rstrip()
             for ident, frame in sys._current_frames().items() if ident != threading.get_ident()]
    return "\n".join(parts)


def start_worker(report: Report) -> Start:
    """Read `Start` from standard input and tie this process's life to its parent's.

    The parent alone decides when a worker ends, by closing the pipe: signals that a terminal or a service manager sends
    to the whole group are ignored. A worker saves what its report says and leaves at once. What else comes on the
    pipe asks for a `report`; SIGUSR1 prints stacks even when a native call holds Python's lock.
    """
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also when a long native call holds the lock
        if os.getppid() != start.parent:
            os._exit(1)
    threading.Thread(target=_leave_with_parent, args=(report,), name="lifeline", daemon=True).start()
    return start


def _leave_with_parent(report: Report) -> None:
    while sys.stdin.buffer.read(1):
        try:
            report()
        except Exception:  # what it looks at may change under it; the thread has another duty
            log.exception("no report can be made")
    _leave(report, 0)


def _leave(report: Report, code: int) -> None:
    """End this process, whatever saving comes to."""
    try:
        report.save()
    finally:
        os._exit(code)


def run_worker(role: str, listener: str, body: Callable[[Start, zmq.Context, zmq.Socket, Report], None]) -> None:
    """Start and run `body` with a socket to `listener`, the next on the way to the API; if it fails, say so there.

    A failed worker exits with code `SPOKE`.
    """
    report = Report()
    start = start_worker(report)
    set_up_logging(start.config.server)
    context = zmq.Context()
    outbox = write_socket(context, start.directory, listener)
    try:
        body(start, context, outbox, report)
    except BaseException as error:
        if describe(error) != str(error) or debug_level():
            sys.excepthook(type(error), error, error.__traceback__)
        outbox.send(encode(Failed(role, describe(error))))
        context.destroy(LINGER_MS)
        _leave(report, SPOKE)
