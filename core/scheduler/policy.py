"""In which order waiting requests are admitted."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ..registry import Registry

if TYPE_CHECKING:
    from .request import Request

AGED = 10.0    # seconds after which a waiting request is served in order of arrival, whatever the policy prefers
WINDOW = 128   # waiting requests that a policy may look at in one step, so that a long queue costs no more


class SchedulePolicy(Protocol):
    """Orders the head of the waiting queue. Retracted requests are put before all others by the scheduler."""

    def order(self, waiting: Sequence[Request], cached: Callable[[Request], int], now: float) -> list[Request]:
        """The same requests, first to be admitted first. `cached` gives a request's cached prompt tokens."""
        ...


class FirstComeFirstServed:
    """By priority (higher first), then by arrival."""

    def order(self, waiting: Sequence[Request], cached: Callable[[Request], int], now: float) -> list[Request]:
        return sorted(waiting, key=lambda r: -r.priority)


class LongestPrefixMatch:
    """By priority, then requests that waited `AGED` seconds, then the longest cached prefix, then arrival.

    Serving cached prefixes together keeps them from being evicted in between (Zheng et al. 2024, SGLang).
    """

    def order(self, waiting: Sequence[Request], cached: Callable[[Request], int], now: float) -> list[Request]:
        head = [(-r.priority, 0, 0) if now - r.arrival > AGED else (-r.priority, 1, -cached(r))
                for r in waiting[:WINDOW]]
        by_key = sorted(range(len(head)), key=head.__getitem__)
        return [waiting[i] for i in by_key] + list(waiting[WINDOW:])


POLICIES = Registry("schedule policy", SchedulePolicy, ("order",))
POLICIES.register("fcfs", FirstComeFirstServed)
POLICIES.register("lpm", LongestPrefixMatch)
