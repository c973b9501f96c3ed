"""What the scheduler counts. Counters only grow; the windowed ratio is over the last requests admitted."""
from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .request import Request

WINDOW = 1000  # requests in the windowed hit rate


class SchedulerStats:
    """Hit rates are in tokens; re-prefills of retracted requests, which would inflate them, are counted apart."""

    def __init__(self) -> None:
        self.requests = 0                 # first admissions
        self.prompt_tokens = 0            # of first admissions
        self.cached_tokens = 0            # of those, found in the cache
        self.reprefill_tokens = 0         # tokens of retracted requests at their later admissions
        self.reprefill_cached_tokens = 0  # of those, found in the cache
        self.generated_tokens = 0
        self.forced_tokens = 0            # of those, known without being sampled, since a grammar allows no others
        self.preemptions = 0
        self.queue_seconds = 0.0          # summed over first admissions
        self.finish_reasons: Counter[str] = Counter()
        self._window: deque[tuple[int, int]] = deque(maxlen=WINDOW)

    def admitted(self, request: Request, cached: int, now: float) -> None:
        """A request got its slot; `cached` of its known tokens were in the cache."""
        if request.attempts:
            self.reprefill_tokens += request.known
            self.reprefill_cached_tokens += cached
        else:
            self.requests += 1
            self.prompt_tokens += request.known
            self.cached_tokens += cached
            self.queue_seconds += max(0.0, now - request.arrival)
            self._window.append((request.known, cached))
            request.cached, request.started = cached, now
        request.attempts += 1

    def finished(self, request: Request) -> None:
        self.finish_reasons[request.finish] += 1

    def hit_rate_window(self) -> float:
        """Cached share of the prompt tokens of the last `WINDOW` first admissions; 0 when there were none."""
        total = sum(known for known, _ in self._window)
        return sum(cached for _, cached in self._window) / total if total else 0.0

    def snapshot(self) -> dict[str, Any]:
        """All counters as plain numbers."""
        counters = {k: v for k, v in vars(self).items() if isinstance(v, int | float)}
        return {**counters, "finish_reasons": dict(self.finish_reasons), "hit_rate_window": self.hit_rate_window(),
                "hit_rate_total": self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0}
