"""In which order waiting requests are admitted."""
from __future__ import annotations

import pytest
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.registry import RegistrationError
from isthmus.core.scheduler.policy import AGED, POLICIES, WINDOW, View
from isthmus.core.scheduler.request import Request
from isthmus.core.scheduler.scheduler import Scheduler

from .scheduling import Run


def waiting(*entries: tuple[str, int, float]) -> list[Request]:
    """(id, priority, arrival) each, in order of arrival."""
    return [Request(Submit(rid, pack_ids([1]), SamplingParams(), priority=priority, arrival=arrival), (), 1)
            for rid, priority, arrival in entries]


def order(policy: str, requests: list[Request], cached: dict[str, int], now: float = 5.0) -> list[str]:
    queue = POLICIES.create(policy)
    for request in requests:
        queue.add(request)
    ordered = [r.id for r in queue.order(View(lambda r: cached.get(r.id, 0), now))]
    assert sorted(ordered) == sorted(r.id for r in requests[:WINDOW])
    return ordered


def test_first_come_first_served_by_priority():
    requests = waiting(("a", 0, 1.0), ("b", 1, 2.0), ("c", -1, 3.0), ("d", 1, 4.0))
    assert order("fcfs", requests, {"c": 99}) == ["b", "d", "a", "c"]


def test_longest_prefix_first_then_arrival():
    requests = waiting(("a", 0, 1.0), ("b", 0, 2.0), ("c", 0, 3.0), ("d", 1, 4.0))
    assert order("lpm", requests, {"b": 16, "c": 32}) == ["d", "c", "b", "a"]
    assert order("lpm", requests, {}) == ["d", "a", "b", "c"]


def test_who_waited_long_goes_by_arrival():
    requests = waiting(("old", 0, 1.0), ("older", 0, 0.5), ("new", 0, 8.0), ("high", 1, 9.0))
    assert order("lpm", requests, {"new": 64, "older": 1}, now=AGED + 1.5) == ["high", "old", "older", "new"]


def test_a_long_queue_is_looked_at_up_to_the_window_only():
    requests = waiting(*((f"r{i}", 0, 1.0) for i in range(WINDOW + 50)))
    asked, queue = [], POLICIES.create("lpm")
    for request in requests:
        queue.add(request)
    list(queue.order(View(lambda r: asked.append(r.id) or 0, 2.0)))
    assert len(asked) == WINDOW
    assert order("lpm", requests, {"r5": 8, f"r{WINDOW + 1}": 99})[:2] == ["r5", "r0"]


@pytest.mark.parametrize(("policy", "first"), [("lpm", "r2"), ("fcfs", "r1")])
def test_the_scheduler_asks_its_policy(policy, first):
    run = Run(max_running=1, policy=policy)
    run.submit([*range(9)], max_tokens=2)
    run.step()
    run.submit([30] * 9, max_tokens=2)
    run.submit([*range(9), 8], max_tokens=2)
    while run.scheduler.stats.requests < 2:
        run.step()
    assert [r.id for r in run.scheduler._running.values()] == [first]
    run.finish()


def test_an_unknown_policy_names_those_there_are():
    with pytest.raises(RegistrationError, match="unknown schedule policy 'magic'; there are: deadline, dfs-weight"):
        Scheduler(Run().limits, Run().cache, "magic")
