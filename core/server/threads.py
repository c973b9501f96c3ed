"""Work that may take long runs beside the event loop, which every request and every stream needs."""
from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

SMALL = 2000   # bytes of text, JSON or ids: about 0.3 ms of work, less than a thread's round trip can cost others
LARGE = 2**18  # seconds of work may be in more
THREADS = 4


class Threads:
    """A few threads. Large work is done one at a time, so that it neither takes them all nor adds up its memory."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="server")
        self._large = asyncio.Lock()

    async def run(self, work: Callable[[], T], size: int, always: bool = False) -> T:
        """What `work` returns or raises. `size`: bytes that it goes through; small work is done at once, unless it
        must `always` run in a thread because its size says little of its time."""
        if size <= SMALL and not always:
            return work()
        if size <= LARGE:
            return await self._submit(work)
        async with self._large:
            return await self._submit(work)

    async def _submit(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
