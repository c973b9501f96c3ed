"""Loads: requests at a time (closed loop), or at given times whatever the server does (open loop).

In an open loop every latency counts from the time at which the request was due. A server that stalls thus pays for all
who would have come meanwhile, though this client may not have sent them yet (G. Tene calls the opposite coordinated
omission). The client watches itself: an event loop that runs late measures itself and no server.
"""
from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from ..errors import ConfigError
from .arrivals import arrivals
from .client import Client, Target
from .percentiles import Sketch
from .recorder import Outcome, Recorder, Slo
from .workload import Ask, Session, Workload

MAX_AT_ONCE = 4096   # requests in flight; later ones wait here, and their wait counts
TICK = 0.005         # seconds between two looks at the own event loop
LATE_S, BUSY = 0.02, 0.9  # a loop this late at its p99, or a core this busy: the client's own times are in the figures


@dataclass(frozen=True)
class Load:
    """How it is asked: `concurrency` sessions at once, or `rate` sessions a second by `arrivals`, or at the workload's
    own times ("trace"). limit: most requests in flight in an open loop."""

    concurrency: int | None = None
    rate: float | None = None
    arrivals: str = "poisson"
    limit: int = MAX_AT_ONCE
    seed: int = 0

    @property
    def open(self) -> bool:
        return self.concurrency is None

    @property
    def facts(self) -> dict[str, Any]:
        if not self.open:
            return {"loop": "closed", "concurrency": self.concurrency}
        return {"loop": "open", "arrivals": self.arrivals, "rate": self.rate, "limit": self.limit}

    def __str__(self) -> str:
        if not self.open:
            return f"{self.concurrency} at once"
        return "at the trace's times" if self.rate is None else f"{self.rate:g} a second, {self.arrivals}"


class Watch:
    """How late the client's own event loop ran, and how busy it was."""

    def __init__(self) -> None:
        self.lag = Sketch()
        self._began, self._cpu = time.monotonic(), time.process_time()

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK)
            self.lag.add(max(0.0, time.monotonic() - began - TICK))

    def report(self) -> dict[str, Any]:
        busy = (time.process_time() - self._cpu) / max(time.monotonic() - self._began, 1e-9)
        lag = self.lag.summary()
        slow = busy > BUSY or lag.get("p99", 0.0) > LATE_S
        return {"loop_lag": lag, "busy": busy, "bottleneck": slow}


Tell = Callable[[int, int], None]


async def drive(workload: Workload, load: Load, target: Target, slo: Slo, rows: TextIO | None = None,
                tell: Tell = lambda done, total: None) -> tuple[Recorder, dict[str, Any]]:
    """Run the workload under the load: what was recorded, and how the client itself did. tell(done, total)."""
    if load.open and load.rate is None and not workload.timed:
        raise ConfigError("arrivals of a trace need a trace: --trace FILE")
    client, watch = Client(target), Watch()
    watching = asyncio.create_task(watch.run())
    recorder = Recorder(slo, time.monotonic(), rows)

    def record(outcome: Outcome) -> None:
        recorder.add(outcome)
        tell(recorder.sent, workload.requests)
    try:
        await (_open if load.open else _closed)(workload.sessions(), load, client, record, recorder.start)
    finally:
        watching.cancel()
        client.close()
    return recorder, watch.report()


async def _closed(sessions: Iterator[Session], load: Load, client: Client, record: Callable[[Outcome], None],
                  start: float) -> None:
    async def one() -> None:
        for session in sessions:  # shared by all, so that each takes the next
            await _talk(session, client, record, None)
    async with asyncio.TaskGroup() as group:
        for _ in range(load.concurrency or 1):
            group.create_task(one())


async def _open(sessions: Iterator[Session], load: Load, client: Client, record: Callable[[Outcome], None],
                start: float) -> None:
    places = asyncio.Semaphore(load.limit)
    times = arrivals(load.arrivals, load.rate, load.seed) if load.rate else None

    async def one(session: Session, due: float) -> None:
        try:
            await _talk(session, client, record, due)
        finally:
            places.release()
    async with asyncio.TaskGroup() as group:
        for session in sessions:
            due = start + (next(times) if times is not None else session.due or 0.0)
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            await places.acquire()
            group.create_task(one(session, due))


async def _talk(session: Session, client: Client, record: Callable[[Outcome], None], due: float | None) -> None:
    """All turns of a session; one that fails ends it, and the turns that it would have had are failures too."""
    said: list[Any] = []
    for number, ask in enumerate(session.asks):
        several = len(session.asks) > 1
        if several:
            said = [*said, *ask.prompt]
            ask = Ask(said, ask.max_tokens)
        outcome = await client.ask(ask, due, keep=several)
        record(outcome)
        if outcome.error:
            for _ in session.asks[number + 1:]:
                now = time.monotonic()
                record(Outcome(now, now, now, [], [], error="turn before failed", message=outcome.message))
            return
        if several:
            said.append({"role": "assistant", "content": outcome.text})
            due = time.monotonic() + session.think
            if session.think and number + 1 < len(session.asks):
                await asyncio.sleep(session.think)


def run_loop(work: Awaitable[Any]) -> Any:
    """Run it on the fastest event loop there is."""
    try:
        import uvloop
        return uvloop.run(work)
    except ImportError:  # there is none for Windows
        return asyncio.run(work)
