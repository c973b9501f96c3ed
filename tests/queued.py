"""A worker thread without a thread: steps of a platform are run when somebody asks for them."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isthmus.core.plan import StepResult


class Fault(Exception):
    """The device failed, as it was told to."""


class Queue:
    """Runs steps in order: at once, or as late as possible, when the host's arrays may have changed."""

    def __init__(self, late: bool):
        self.late, self.pending = late, []

    def submit(self, run: Callable[..., StepResult], *args: Any) -> Queued:
        item = Queued(self, lambda: run(*args))
        self.pending.append(item)
        if not self.late:
            self.run_until(item)
        return item

    def run_until(self, item: Queued) -> None:
        while item in self.pending:
            self.pending.pop(0).run()

    def shutdown(self) -> None:
        self.pending.clear()


class Queued:
    """One step's future."""

    def __init__(self, queue: Queue, call: Callable[[], StepResult]):
        self.queue, self.call, self.value, self.error = queue, call, None, None

    def run(self) -> None:
        try:
            self.value = self.call()
        except (Fault, AssertionError) as error:
            self.error = error

    def result(self) -> StepResult:
        self.queue.run_until(self)
        if self.error:
            raise self.error
        return self.value
