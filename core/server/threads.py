"""Work that may take long runs beside the event loop, which every request and every stream needs."""
from __future__ import annotations

import asyncio
import itertools
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from ..errors import Overloaded
from .limits import FREE_BODY

T = TypeVar("T")

SMALL = 2000   # bytes of text, JSON or ids: about 0.3 ms of work, less than a thread's round trip can cost others
LARGE = 2**18  # seconds of work may be in more
THREADS = 4
PASS_BYTES_PER_S = 10_000  # work of so many bytes lets pass what comes up to a second after it
MAX_WAITING = 2**26        # bytes of work that may wait for one lane


class Lane:
    """Threads with a queue in which small work passes large work, but only what came soon after it.

    Work whose caller is cancelled before it starts is dropped at once, with all that it holds.
    """

    def __init__(self, threads: int):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="server")
        self._queue: queue.PriorityQueue[tuple[float, int]] = queue.PriorityQueue()  # when it is due, key of its job
        self._jobs: dict[int, tuple[Future[Any], Callable[[], Any]]] = {}
        self._keys = itertools.count()
        self._waiting = 0

    async def run(self, work: Callable[[], T], size: int, refusable: bool) -> T:
        """What `work`, which goes through `size` bytes, returns or raises.

        Raises `Overloaded` (503) for `refusable` work when too much waits. Of each piece the bytes that every body may
        have do not count: the number of connections bounds them.
        """
        counted = max(0, size - FREE_BODY)
        if refusable and counted and self._waiting and self._waiting + counted > MAX_WAITING:
            raise Overloaded(f"large requests with {self._waiting} bytes wait to be read; send this one again later",
                             status=503, retry_after=5)
        future: Future[T] = Future()
        key = next(self._keys)
        self._jobs[key] = future, work
        self._queue.put((time.monotonic() + size / PASS_BYTES_PER_S, key))
        self._waiting += counted
        try:
            self._pool.submit(self._next)
            return await asyncio.wrap_future(future)
        finally:
            del self._jobs[key]
            self._waiting -= counted

    def _next(self) -> None:
        _, key = self._queue.get_nowait()  # there is one for each call
        future, work = self._jobs.get(key, (None, None))
        if future is not None and future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:  # raised where the work is waited for
                future.set_exception(error)

    def close(self) -> None:
        """Start nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Threads:
    """Three lanes. Large work is done one piece at a time, so that it neither takes all threads nor adds up its memory;
    large texts that are only converted have their own thread, so that generation never waits for them."""

    def __init__(self) -> None:
        self._usual, self._large, self._text = Lane(THREADS), Lane(1), Lane(1)

    async def read(self, work: Callable[[], T], size: int, text: bool = False) -> T:
        """What `work` makes of a request of `size` bytes. text: it only converts text. `Overloaded` (503) when too much
        waits already."""
        if text and size > FREE_BODY:
            return await self._text.run(work, size, refusable=True)
        return await (self._usual if size <= LARGE else self._large).run(work, size, refusable=True)

    async def run(self, work: Callable[[], T], size: int) -> T:
        """What `work` makes of an answer of `size` bytes; small work is done at once."""
        if size <= SMALL:
            return work()
        return await (self._usual if size <= LARGE else self._large).run(work, size, refusable=False)

    def close(self) -> None:
        """End the threads."""
        for lane in (self._usual, self._large, self._text):
            lane.close()
