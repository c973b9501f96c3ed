"""`--dump-requests`: the bodies of requests, one JSON object a line, so that they can be sent again.

A line has time (seconds since 1970), id (as `x-request-id`), method, path and body. No header is kept, so no key is;
nor is a field that is called like one, wherever in the body it is. Bodies that were refused before they were understood
are left out.
"""
from __future__ import annotations

import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from ..config import ServerSettings, size_bytes
from ..files import named_path, open_private

T = TypeVar("T")

MAX_WAITING = 2**26  # bytes that wait to be written
NAME_END = 64  # characters of a name that are looked at
# What names of secrets end with, and those that are secrets only as a whole; lower case, letters and digits alone.
_SECRET = re.compile(r"(api|access|secret|private)keys?$|(secret|password|passwd|authorization|bearer|cookie)s?$"
                     r"|(headers|credentials?)$|(access|api|auth|bearer|hf|refresh|session)tokens?$|^(token|auth|passphrase)$")
_PUNCTUATION = re.compile(r"[^a-z0-9]+")
# A text without any of these has no such name. Names may be written with escapes.
_PERHAPS = re.compile(rb"key|secret|passw|passp|auth|bearer|cookie|header|credential|token|\\u", re.IGNORECASE)

log = logging.getLogger(__name__)


class RequestDump:
    """Appends to a file, on a thread of its own: a slow disk loses lines, which the log tells, and delays nobody."""

    def __init__(self, file: int, size: int, limit: int):
        self._file, self._size, self._limit = file, size, limit
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._waiting, self._told = 0, False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="request-dump", daemon=True)
        self._thread.start()

    def kept(self, request: Request, work: Callable[[bytes], T]) -> Callable[[bytes], T]:
        """The same work on a body, which is kept if that succeeds."""
        method, path, id = request.method, request.scope["path"], request.scope.get("state", {}).get("request_id", "")

        def keeping(body: bytes) -> T:
            result = work(body)
            self.add(method, path, id, body)
            return result
        return keeping

    def add(self, method: str, path: str, id: str, body: bytes) -> None:
        """Keep a request. body: JSON, an object."""
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            kept = {name: _cleaned(value) for name, value in fields.items() if not _is_secret(name)}
        except msgspec.DecodeError:
            return
        line = {"time": round(time.time(), 3), "id": id, "method": method, "path": path, "body": kept}
        data = msgspec.json.format(msgspec.json.encode(line), indent=-1) + b"\n"
        with self._lock:
            full, late = self._size + len(data) > self._limit, self._waiting + len(data) > MAX_WAITING
            if not full and not late:
                self._size += len(data)
                self._waiting += len(data)
                self._lines.put(data)
            tell, self._told = (full or late) and not self._told, self._told or full or late
        if tell:
            log.warning("--dump-requests: %s", "the file has reached --dump-limit; nothing more is kept" if full else
                        "the disk is too slow; some requests are not kept")

    def close(self) -> None:
        """Write what waits."""
        self._lines.put(None)
        self._thread.join(10)

    def _write(self) -> None:
        while (data := self._lines.get()) is not None:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._file, view):]
            except OSError as error:
                log.error("--dump-requests: nothing more is kept: %s", error.strerror)
                self._limit, self._told = 0, True
                break
            finally:
                with self._lock:
                    self._waiting -= len(data)
        os.close(self._file)


def _is_secret(name: str) -> bool:
    return _SECRET.search(_PUNCTUATION.sub("", name[-NAME_END:].lower())) is not None


def _cleaned(raw: msgspec.Raw) -> Any:
    """A value without secrets; as it was sent, if it can hold none."""
    data = bytes(raw)
    return _without_secrets(msgspec.json.decode(data)) if data[:1] in b"{[" and _PERHAPS.search(data) else raw


def _without_secrets(value: Any, named: bool = False) -> Any:
    """named: the names in it are what a JSON Schema describes; behind such a name is a schema, no secret."""
    if isinstance(value, list):
        return [_without_secrets(each) if isinstance(each, dict | list) else each for each in value]
    if isinstance(value, dict):
        return {name: _without_secrets(each, name in ("properties", "$defs")) for name, each in value.items()
                if not _is_secret(name) or named and isinstance(each, dict)}
    return value


def open_dump(settings: ServerSettings) -> RequestDump | None:
    """The dump that the settings ask for, if any. Raises `ConfigError` for a place where none can be."""
    if settings.dump_requests is None:
        return None
    path = named_path(settings.dump_requests)
    file = open_private(str(path), "--dump-requests", os.O_WRONLY | os.O_APPEND)
    return RequestDump(file, os.fstat(file).st_size, size_bytes(settings.dump_limit))
