"""The one thread that all of MLX's work runs on, and the steps in flight on it.

MLX's streams, and its cache of compiled graphs, belong to the thread that made them: both must be used, and given up,
on that thread. An executor of the standard library ends its threads without a last word, hence this one.
"""
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol

import mlx.core as mx


class Flight(Protocol):
    """A dispatched step."""

    def finish(self) -> None:
        """Wait for it and hand over its result."""


class Line:
    """Runs what is posted, in order. `settle` and `dispatch` are for work that runs there."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue = SimpleQueue()
        self._flight: Flight | None = None
        self._graphs: dict[int, Callable[[], None]] = {}
        thread = threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True)
        thread.start()
        # Also when the interpreter ends: graphs that live longer would need Python after its end.
        self._stop = weakref.finalize(self, _stop, self._jobs, thread, self._graphs)

    def post(self, work: Callable[..., Any], *args: Any) -> Future:
        if not self._stop.alive:
            raise RuntimeError("the mlx platform was closed")
        future: Future = Future()
        self._jobs.put((future, work, args))
        return future

    def call(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run after the steps that were launched before, and wait."""
        return self.post(self._settled, work, *args).result()

    def settle(self) -> None:
        """Wait for the step in flight and hand over its result."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.finish()

    def dispatch(self, flight: Flight, arrays: list[mx.array]) -> None:
        """Start the step once the one before is done."""
        self.settle()
        mx.async_eval(arrays)
        self._flight = flight

    def own(self, owner: Any, drop: Callable[[], None]) -> None:
        """Have `drop` run on the thread when `owner` goes away or the line closes. It must not refer to `owner`."""
        self._graphs[id(owner)] = drop
        weakref.finalize(owner, _give_up, weakref.ref(self), self._graphs, id(owner)).atexit = False

    def close(self) -> None:
        """Wait for what was posted; later work is refused."""
        if self._stop.alive:
            self.call(lambda: None)
            self._stop()

    def _settled(self, work: Callable[..., Any], *args: Any) -> Any:
        self.settle()
        return work(*args)


def _serve(jobs: SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        future, work, args = job
        try:
            future.set_result(work(*args))
        except BaseException as error:  # it belongs to whoever waits
            future.set_exception(error)
        del job, future, work, args  # they would live on until the next job


def _give_up(line: weakref.ref, graphs: dict[int, Callable[[], None]], owner: int) -> None:
    drop, found = graphs.pop(owner, None), line()
    if drop is not None and found is not None and found._stop.alive:
        found.post(drop)


def _stop(jobs: SimpleQueue, thread: threading.Thread, graphs: dict[int, Callable[[], None]]) -> None:
    for drop in [*graphs.values(), mx.clear_cache]:
        jobs.put((Future(), drop, ()))
    graphs.clear()
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()
