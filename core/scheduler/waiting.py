"""The requests that wait, as many as there is room for."""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from ..adapters.slots import Slots
from ..errors import Overloaded
from .admission import Limits
from .policy import SchedulePolicy
from .request import Request

MOST_WAIT = 60.0  # seconds after which a refused client may always ask again


class Waiting:
    """An ordered set, as they came; in which order they leave is the policy's business. tokens: of all of them.

    A waiting request costs its packed prompt and under 1 KB: what a running one needs is made when it is admitted.
    """

    def __init__(self, limits: Limits, policy: SchedulePolicy, slots: Slots):
        self._limits, self._policy, self._slots = limits, policy, slots
        self._requests: dict[Request, None] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request] = None
        self.tokens += request.known
        self._slots.queue(request.adapter)
        self._policy.add(request)

    def remove(self, request: Request) -> None:
        del self._requests[request]
        self.tokens -= request.known
        self._slots.unqueue(request.adapter)
        self._policy.remove(request)

    def check(self, free_slots: int, pace: float) -> None:
        """Raises `Overloaded` unless one more may wait. pace: seconds for a prompt token, which tells when to ask
        again."""
        limits, queued = self._limits, len(self) - free_slots
        if queued >= limits.max_queued:
            what, flag = f"{queued} requests are waiting for a place, the limit is {limits.max_queued}", "requests"
        elif len(self) and self.tokens >= limits.max_queued_tokens:
            what = f"the waiting requests have {self.tokens} tokens, the limit is {limits.max_queued_tokens}"
            flag = "tokens"
        else:
            return
        raise Overloaded(f"{what}: try again later or raise --max-queued-{flag}",
                         retry_after=min(MOST_WAIT, max(1.0, math.ceil(self.tokens * pace / 2))))


def overdue(waiting: Waiting, running: Iterable[Request], limits: Limits, now: float,
            ) -> Iterator[tuple[Request, str, int]]:
    """Requests that have waited or run for too long, with what they are told and the HTTP status."""
    for request in waiting:
        if not request.attempts and now - request.arrival > limits.waiting_timeout:
            yield request, (f"waited {now - request.arrival:.0f} s, the limit is {limits.waiting_timeout:.0f} s "
                            "(--waiting-timeout)"), 503
    for request in [*running, *(r for r in waiting if r.attempts)]:
        if now - request.started > limits.running_timeout:
            yield request, (f"ran {now - request.started:.0f} s, the limit is {limits.running_timeout:.0f} s "
                            "(--running-timeout)"), 504
