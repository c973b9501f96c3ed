"""Responses that go on whether or not anybody waits for them (`background`), and their streams as often as wanted."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ...errors import Overloaded, RequestError
from .wire import error_event

if TYPE_CHECKING:
    from .answer import ResponseAnswer

MAX_RUNS = 128      # at once
MAX_BODIES = 4      # bodies of the largest size that they keep together
MAX_EVENTS = 2**22  # bytes of a run's events that are kept for those who ask for them again
END = b"\n\n"       # of an event; no JSON has it


class Run:
    """One response in the background. Its first events are there at once."""

    def __init__(self, answer: ResponseAnswer):
        self.answer, self.ended = answer, False
        self._events: list[bytes] = []  # by sequence number, from `_first` on
        self._first = self._size = 0
        self._more = asyncio.Event()
        self._ending = False
        self._append(answer.begin("queued", "in_progress"))
        self._size = 0  # each of these repeats the request
        self.task = asyncio.ensure_future(self._work())

    @property
    def id(self) -> str:
        return self.answer.response["id"]

    async def _work(self) -> None:
        try:
            await self.answer.keep(None)
            async for data in self.answer.events():
                self._append(data)
        except asyncio.CancelledError:
            self._append(self.answer.builder.end("cancelled"))
        except Exception:  # its events have told of it, and the answer's log
            pass
        self._ending = True
        await self.answer.keep(b"".join(self._events) if self.answer.asked.stream and not self._first else None)
        self.ended = True
        self._wake()

    def cancel(self) -> None:
        """End it, unless it is ending."""
        if not self._ending:
            self.task.cancel()

    def _append(self, data: bytes) -> None:
        self._events += [part + END for part in data.split(END)[:-1]]
        self._size += len(data)
        while self._size > MAX_EVENTS and len(self._events) > 1:
            half = len(self._events) // 2  # one by one, each would move all the rest
            del self._events[:half]
            self._first += half
            self._size = sum(map(len, self._events))
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Events with a higher number than `after`, until the end."""
        at = after + 1
        while True:
            more = self._more
            if at < self._first:
                error = RequestError(f"events up to {self._first - 1} are no longer kept; ask for the response itself",
                                     param="starting_after", code="invalid_value")
                if at > after + 1:
                    yield error_event(error, at)
                raise error
            new = self._events[at - self._first:]
            if new:
                at += len(new)
                yield b"".join(new)
            elif self.ended:
                return
            else:
                await more.wait()


class Background:
    """All that run. total: bytes of requests that they may keep together. held: that they do."""

    def __init__(self, most: int) -> None:
        self._runs: dict[str, Run] = {}
        self.total, self.held = MAX_BODIES * most, 0

    def start(self, answer: ResponseAnswer) -> Run:
        """Let a response run. Raises 429 when too many do, or they keep too much."""
        if len(self._runs) >= MAX_RUNS:
            raise Overloaded(f"{MAX_RUNS} responses run in the background, which is the limit; cancel one or wait")
        if self.held + answer.size > self.total:
            raise Overloaded(f"the requests of the responses that run in the background hold {self.held} bytes, and "
                             f"with these {answer.size} more than {self.total}; cancel one or wait")
        run = Run(answer)
        self._runs[run.id] = run
        self.held += answer.size
        run.task.add_done_callback(lambda _: self._end(run))
        return run

    def _end(self, run: Run) -> None:
        del self._runs[run.id]
        self.held -= run.answer.size

    def find(self, owner: str, id: str) -> Run | None:
        """The run of this owner's response, while it lasts."""
        run = self._runs.get(id)
        return run if run is not None and run.answer.kept.owner == owner else None

    async def end(self, run: Run) -> None:
        """Cancel a run, and wait until it is stored as it is."""
        run.cancel()
        await asyncio.wait([run.task])

    async def close(self) -> None:
        """Cancel all."""
        runs = list(self._runs.values())
        for run in runs:
            run.cancel()
        if runs:
            await asyncio.wait([run.task for run in runs])
