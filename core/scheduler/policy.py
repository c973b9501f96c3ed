"""In which order waiting requests are admitted, and who gives way to them.

A policy keeps the queue: it is told who comes and goes, and asked for the best ones when there is room. The queue is
sorted by a key that time does not change; what depends on the cache or the time is looked at for the first `WINDOW`.
Ageing is part of the keys: n seconds of waiting count like being better by so much, which is the same as a key that
grows with the time of arrival. So a bound holds on who may be put before a request, however many come.
"""
from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ..registry import Registry

if TYPE_CHECKING:
    from .request import Request
    from .table import RequestTable

AGED = 10.0         # seconds after which a waiting request is served in order of arrival, whatever the policy prefers
WINDOW = 128        # waiting requests that a policy may look at in one step
LEVEL = 30.0        # seconds of waiting that count like one level of priority
SPEED = 2000.0      # tokens that a second of waiting makes a prompt shorter, for shortest-first
QUANTUM = 2048.0    # tokens that a tenant may take in one round of shares
OUTPUT_COST = 2     # an output token costs as much as so many of a prompt (VTC's weights, Sheng et al. 2024)
TENANTS = 4096      # tenants whose debt is remembered
PATIENCE = 10.0     # seconds in which a request without a wish is to have its first token
LATE_SHARE = 4      # one admission in so many goes to a request that has missed its deadline


class View(NamedTuple):
    """What a policy is told when it is asked.

    cached: tokens of a waiting request's prefix that the cache has. now: seconds. pace: seconds that a prompt token
    takes as measured, 0 = not known.
    """

    cached: Callable[[Request], int]
    now: float
    pace: float = 0.0


class SchedulePolicy(Protocol):
    """The queue of waiting requests. One that was sent back waits again, with `attempts` above 0."""

    def add(self, request: Request) -> None:
        """`request` waits. `ticket` of it is the policy's to use."""
        ...

    def remove(self, request: Request) -> None:
        """It waits no more: admitted, or ended."""
        ...

    def order(self, view: View) -> Iterator[Request]:
        """The best waiting requests, best first, each once. The caller may remove what it was given last, and stop."""
        ...

    def charge(self, tenant: str, prompt: int, output: int) -> None:
        """So many prompt tokens are to be computed, and output tokens were, for this tenant."""
        ...

    def preempt(self, running: Iterable[Request]) -> tuple[Request, Request] | None:
        """The best waiting request, and which of the running ones (in order of admission) gives way to it if it cannot
        start otherwise; None where nobody does."""
        ...

    def victim(self, running: Iterable[Request]) -> Request:
        """Which of the running requests (one at least, in order of admission) gives way when memory is short."""
        ...


class Line:
    """Waiting requests sorted by a key that never changes, then by arrival here."""

    def __init__(self) -> None:
        self._entries: list[tuple] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, key: tuple, serial: int) -> None:
        request.ticket = (key, serial, request)
        insort(self._entries, request.ticket)

    def remove(self, request: Request) -> None:
        """The entry of a request that is in this line."""
        del self._entries[bisect_left(self._entries, request.ticket)]
        request.ticket = None  # it names the request: no circle may keep an ended one

    def head(self, count: int = WINDOW) -> list[Request]:
        """The first `count` requests."""
        return [entry[2] for entry in self._entries[:count]]

    def passed(self, key: tuple) -> list[Request]:
        """Requests that nobody sent back with a key below `key`."""
        return [entry[2] for entry in self._entries[:bisect_left(self._entries, (key,))] if not entry[2].attempts]


class FirstComeFirstServed:
    """Those sent back first, then by priority (higher first), then by arrival."""

    def __init__(self) -> None:
        self._line, self._serial = Line(), itertools.count()

    def key(self, request: Request) -> tuple:
        """What the line is sorted by."""
        return (0, request.turn) if request.attempts else (1, -request.priority)

    def add(self, request: Request) -> None:
        self._line.add(request, self.key(request), next(self._serial))

    def remove(self, request: Request) -> None:
        self._line.remove(request)

    def order(self, view: View) -> Iterator[Request]:
        return iter(self._line.head())

    def charge(self, tenant: str, prompt: int, output: int) -> None:
        pass

    def preempt(self, running: Iterable[Request]) -> tuple[Request, Request] | None:
        return None

    def victim(self, running: Iterable[Request]) -> Request:
        """The lowest priority, then the latest admitted: the least work is lost."""
        return min(reversed(list(running)), key=lambda r: r.priority)

    def _by_class(self, view: View) -> Iterator[tuple[bool, list[Request]]]:
        """The head of the line in runs that may not be mixed: (may the run be reordered, its requests)."""
        if len(self._line) < 2:
            return iter([(False, self._line.head())])
        rank = lambda r: (r.ticket[0], view.now - r.arrival <= AGED)  # noqa: E731
        by_rank = sorted(self._line.head(), key=rank)  # stable: the aged go first, by arrival
        runs = itertools.groupby(by_rank, rank)
        return ((fresh and key[0] == 1, list(run)) for (key, fresh), run in runs)


class LongestPrefixMatch(FirstComeFirstServed):
    """By priority, then requests that waited `AGED` seconds, then the longest cached prefix, then arrival.

    Serving cached prefixes together keeps them from being evicted in between (Zheng et al. 2024, SGLang).
    """

    def order(self, view: View) -> Iterator[Request]:
        for free, run in self._by_class(view):
            yield from sorted(run, key=lambda r: -view.cached(r)) if free and len(run) > 1 else run


class DepthFirstWeight(FirstComeFirstServed):
    """As "lpm", but depth first through the tree of cached prefixes, at each branch where most requests wait.

    Requests of one branch follow each other, also from step to step, so that its pages need not give way to another's
    in between: a branch that was begun is finished first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._given: Request | None = None              # last, and it still waits
        self._last: tuple[bytes, bytes] | None = None   # domain and tokens of the last one that waits no more

    def remove(self, request: Request) -> None:
        if request is self._given:
            self._given, self._last = None, (request.domain, request.stored)
        super().remove(request)

    def order(self, view: View) -> Iterator[Request]:
        for free, run in self._by_class(view):
            for request in self._walk(run, view) if free and len(run) > 1 else run:
                self._given = request
                yield request

    def _walk(self, run: list[Request], view: View) -> Iterator[Request]:
        paths = sorted(((r.domain, r.stored[:4 * view.cached(r)], i, r) for i, r in enumerate(run)),
                       key=lambda path: path[:3])
        shared = [-1] + [_common(a, b) for a, b in itertools.pairwise(paths)]
        near, begun = self._nearest(paths)
        stack = [(0, len(paths))]
        while stack:
            start, stop = stack.pop()
            if stop - start == 1:
                yield paths[start][3]
                continue
            least = min(shared[start + 1:stop])
            cuts = [start, *(i for i in range(start + 1, stop) if shared[i] == least), stop]
            branches = list(itertools.pairwise(cuts))
            branches.sort(key=lambda b: (near > least and b[0] <= begun < b[1], b[1] - b[0],
                                         -min(p[2] for p in paths[b[0]:b[1]])))
            stack += branches  # the one that was begun is taken next, else the heaviest

    def _nearest(self, paths: list[tuple]) -> tuple[int, int]:
        """Bytes that the request taken last shares with the path nearest to its own, and which one that is."""
        if self._last is None:
            return -1, 0
        at = bisect_left(paths, self._last, key=lambda path: path[:2])
        return max((_common(paths[i], self._last), i) for i in (at - 1, at) if 0 <= i < len(paths))


def _common(a: tuple, b: tuple) -> int:
    """Bytes that the cached prefixes of two paths share; -1 in different domains."""
    if a[0] != b[0]:
        return -1
    low, high = 0, min(len(a[1]), len(b[1]))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[1][:middle] == b[1][:middle] else (low, middle - 1)
    return low


class ShortestFirst(FirstComeFirstServed):
    """By priority, then the fewest prompt tokens left to compute, a second of waiting counting like `SPEED` of them.

    So a prompt of n tokens is passed only by requests that come less than n / `SPEED` seconds after it.
    """

    def key(self, request: Request) -> tuple:
        back = request.attempts > 0
        return (0, request.turn) if back else (1, -request.priority, request.known + SPEED * request.arrival)

    def order(self, view: View) -> Iterator[Request]:
        def left(request: Request) -> tuple:
            key = request.ticket[0]
            return key if key[0] == 0 else (*key[:2], key[2] - view.cached(request))
        return iter(sorted(self._line.head(), key=left))


class PriorityWithPreemption(FirstComeFirstServed):
    """By priority, `LEVEL` seconds of waiting counting like one level; a running request gives way to a better one.

    A request is neither passed nor sent back by one that is d levels better and comes d * `LEVEL` seconds after it.
    """

    def key(self, request: Request) -> tuple:
        return (request.arrival / LEVEL - request.priority,)

    def preempt(self, running: Iterable[Request]) -> tuple[Request, Request] | None:
        best, worst = next(iter(self._line.head(1)), None), self.victim(running)
        better = best is not None and best.priority > worst.priority and self.key(best) < self.key(worst)
        return (best, worst) if better else None

    def victim(self, running: Iterable[Request]) -> Request:
        return max(reversed(list(running)), key=self.key)


class FairShare(FirstComeFirstServed):
    """A share for each tenant, the longest cached prefix first inside the shares (DLPM, Cao et al. 2025).

    A tenant that has computed more than its share waits until the others have had theirs; each round gives every
    waiting tenant `QUANTUM` tokens. Nobody saves up while asking for nothing; debts are forgotten at the same rate.
    Within a tenant by priority; who waited `AGED` seconds goes first there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[str, Line] = {}
        self._share: dict[str, float] = {}

    def add(self, request: Request) -> None:
        line = self._lines.get(request.tenant)
        if line is None:
            line = self._lines[request.tenant] = Line()
            self._share.setdefault(request.tenant, QUANTUM)
        line.add(request, self.key(request), next(self._serial))

    def remove(self, request: Request) -> None:
        line = self._lines[request.tenant]
        line.remove(request)
        if not line:
            del self._lines[request.tenant]

    def charge(self, tenant: str, prompt: int, output: int) -> None:
        self._share[tenant] = self._share.pop(tenant, QUANTUM) - prompt - OUTPUT_COST * output
        while len(self._share) > TENANTS + len(self._lines):
            del self._share[next(t for t in self._share if t not in self._lines)]

    def order(self, view: View) -> Iterator[Request]:
        each = max(2, WINDOW // max(1, len(self._lines)))
        heads = {tenant: line.head(each) for tenant, line in itertools.islice(self._lines.items(), WINDOW)}
        back = sorted((r for head in heads.values() for r in head if r.attempts), key=lambda r: r.turn)
        yield from back
        heads = {tenant: rest for tenant, head in heads.items() if (rest := [r for r in head if not r.attempts])}
        known: dict[Request, int] = {}
        while heads:
            if all(self._share[tenant] <= 0 for tenant in heads):
                self._next_round(min(-self._share[tenant] for tenant in heads))
            best = min((self._rank(r, view, known) for tenant, head in heads.items() if self._share[tenant] > 0
                        for r in head), key=lambda rank: rank[:-1])[-1]
            heads[best.tenant].remove(best)
            if not heads[best.tenant]:
                del heads[best.tenant]
            yield best

    def _rank(self, request: Request, view: View, known: dict[Request, int]) -> tuple:
        fresh = view.now - request.arrival <= AGED
        if fresh and request not in known:
            known[request] = view.cached(request)
        return request.ticket[0], fresh, -known.get(request, 0), request.ticket[1], request

    def _next_round(self, debt: float) -> None:
        """Rounds until one of the waiting tenants, the nearest of which owes `debt`, has a share again."""
        gain = (debt // QUANTUM + 1) * QUANTUM
        for tenant, share in list(self._share.items()):
            if tenant in self._lines:
                self._share[tenant] = min(QUANTUM, share + gain)
            elif share + gain >= 0:
                del self._share[tenant]
            else:
                self._share[tenant] = share + gain


class Deadline(FirstComeFirstServed):
    """By the time at which the first token is wanted (`ttft` after arrival, `PATIENCE` without a wish).

    What can still be in time goes before what cannot: serving the late first would make all late. But one admission in
    `LATE_SHARE` goes to the one that is late since longest, so nobody waits for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._late, self._served = Line(), 0

    def key(self, request: Request) -> tuple:
        return (0, request.turn) if request.attempts else (1, request.arrival + (request.ttft or PATIENCE))

    def remove(self, request: Request) -> None:
        (self._late if request.ticket[0][0] == 2 else self._line).remove(request)

    def order(self, view: View) -> Iterator[Request]:
        self._sort_out(view.now)
        back, in_time, late = [], [], self._late.head()
        for request in self._line.head():
            due = request.ticket[0][1]
            if request.attempts:
                back.append(request)
            elif view.now + view.pace * (request.known - view.cached(request)) <= due:
                in_time.append(request)
            else:
                late.append(request)
        yield from back
        while in_time or late:
            turn = late and (not in_time or self._served % LATE_SHARE == LATE_SHARE - 1)
            yield (late if turn else in_time).pop(0)
            self._served += 1

    def _sort_out(self, now: float) -> None:
        """Move those whose time has passed to the late ones: they are first in the line, behind those sent back."""
        for request in self._line.passed((1, now)):
            due = request.ticket[0][1]
            self._line.remove(request)
            self._late.add(request, (2, due), next(self._serial))


POLICIES = Registry("schedule policy", SchedulePolicy, ("add", "remove", "order", "charge", "preempt", "victim"))
POLICIES.register("fcfs", FirstComeFirstServed)
POLICIES.register("lpm", LongestPrefixMatch)
POLICIES.register("dfs-weight", DepthFirstWeight)
POLICIES.register("shortest-first", ShortestFirst)
POLICIES.register("priority", PriorityWithPreemption)
POLICIES.register("fair", FairShare)
POLICIES.register("deadline", Deadline)


def count_shares(policy: SchedulePolicy, table: RequestTable, running: dict[int, Request]) -> None:
    """Tell the policy how many tokens each running request, by slot, has produced since it was last told."""
    slots = np.fromiter(running, np.int32, len(running))
    fresh = table.known[slots] - table.charged[slots]
    table.charged[slots] += fresh
    for request, count in zip(running.values(), fresh.tolist(), strict=True):
        policy.charge(request.tenant, 0, count)
