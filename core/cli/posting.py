"""Sends many requests to a server, several at once, for the commands that read them from a file."""
from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from ..errors import ConfigError, RequestError
from .backends import MAX_ANSWER, RemoteBackend

T = TypeVar("T")

MAX_LINE = 2**26  # bytes of one request in a file
MAX_AT_ONCE = 1024


class Reply(NamedTuple):
    """An answer. status 0: there was none, and `body` says why. first, seconds: to its first byte and to its end."""

    status: int
    body: bytes
    request_id: str
    first: float
    seconds: float


class Poster(RemoteBackend):
    """Posts bodies over connections that are kept, one for each thread."""

    def __init__(self, url: str, key: str | None, timeout: float):
        super().__init__(url, None, key, timeout)
        self._local = threading.local()

    def post(self, path: str, body: bytes, keep: bool = True) -> Reply:
        """The answer to a JSON body. keep: with what it holds, at most `MAX_ANSWER` bytes."""
        began = time.monotonic()
        for fresh in (False, True):  # a connection that was kept may have been closed meanwhile
            connection = None if fresh else getattr(self._local, "connection", None)
            try:
                if connection is None:
                    connection = self._local.connection = self._connect()
                    fresh = True
                connection.request("POST", self.root_path + path, body, self.headers)
                with connection.getresponse() as response:
                    return self._read(response, began, keep)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                self._local.connection = None
                if fresh or not isinstance(error, ConnectionError):
                    return Reply(0, str(self._unreachable(error).message).encode(), "", 0.0, time.monotonic() - began)
        raise AssertionError("the second try returns")

    def _read(self, response: http.client.HTTPResponse, began: float, keep: bool) -> Reply:
        parts, size, first = [], 0, 0.0
        while piece := response.read1(65536):
            first = first or time.monotonic() - began
            size += len(piece)
            if keep and size <= MAX_ANSWER:
                parts.append(piece)
        if keep and size > MAX_ANSWER:
            return Reply(0, f"the answer has {size} bytes, more than {MAX_ANSWER}".encode(), "", first,
                         time.monotonic() - began)
        return Reply(response.status, b"".join(parts), response.headers.get("x-request-id") or "", first,
                     time.monotonic() - began)


class Daemons:
    """At most so many threads that keep no process alive: who presses Ctrl-C waits for no answer, which may take long.
    """

    def __init__(self, most: int):
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._most, self._threads = most, 0

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """What `work` returns or raises, once a thread is free."""
        future: Future[T] = Future()
        if self._threads < self._most:
            self._threads += 1
            threading.Thread(target=self._run, name="post", daemon=True).start()
        self._jobs.put((future, work, arguments))
        return future

    def close(self) -> None:
        """The threads end when they have done what there is."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work, arguments = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*arguments))
                except BaseException as error:  # raised where it is waited for
                    future.set_exception(error)


def each(items: Iterator[T], work: Callable[[T], Any], at_once: int) -> None:
    """`work` on each item, so many at once; items are taken only as there is a place. Raises the first error."""
    places, failed, threads = threading.Semaphore(at_once), [], Daemons(at_once)

    def run(item: T) -> None:
        try:
            work(item)
        except BaseException as error:
            failed.append(error)
        finally:
            places.release()

    try:
        for item in items:
            places.acquire()
            if failed:
                places.release()
                break
            threads.submit(run, item)
        for _ in range(at_once):
            places.acquire()
    finally:
        threads.close()
    if failed:
        raise failed[0]


def json_lines(path: Path, what: str) -> Iterator[tuple[int, dict[str, Any] | RequestError]]:
    """Number and value of each line of a file that is not blank: an object, or why it is none."""
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise ConfigError(f"{path}, line {number}: it has more than {MAX_LINE} bytes; this is no file of "
                                  f"{what}")
            if line.strip():
                yield number, _object(line, number)


def _object(line: bytes, number: int) -> dict[str, Any] | RequestError:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return RequestError(f"line {number} is not valid JSON: {error}", code="invalid_json")
    if not isinstance(value, dict):
        return RequestError(f"line {number} must be a JSON object, not {type(value).__name__}", code="invalid_json")
    return value


def count_lines(path: Path) -> int:
    """Lines of a file that are not empty."""
    with open(path, "rb") as file:
        return sum(1 for line in iter(lambda: file.readline(MAX_LINE + 1), b"") if line.strip())


def check_file(path: Path | None, ask: str) -> Path:
    """The file that was named; `ConfigError` for none, or what is no regular file."""
    if path is None:
        raise ConfigError(ask)
    if not path.is_file():
        raise ConfigError(f"{path}: {'it is no regular file' if path.exists() else 'there is no such file'}")
    return path


def check_at_once(count: int) -> int:
    """`--concurrency` within its bounds."""
    if not 1 <= count <= MAX_AT_ONCE:
        raise ConfigError(f"--concurrency {count} is out of range, it must be between 1 and {MAX_AT_ONCE}")
    return count
