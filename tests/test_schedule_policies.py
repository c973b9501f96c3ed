"""What each schedule policy promises: its order, who waits how long at most, who gives way, and a whole ledger."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.registry import RegistrationError, Registry
from isthmus.core.scheduler.policy import (
    AGED,
    LATE_SHARE,
    LEVEL,
    OUTPUT_COST,
    PATIENCE,
    POLICIES,
    QUANTUM,
    SPEED,
    TENANTS,
    FirstComeFirstServed,
    SchedulePolicy,
    View,
)
from isthmus.core.scheduler.request import Request

from .scheduling import Run

COST = 4  # seconds
LONG = {"ignore_eos": True}


def request(id: str, arrival: float = 1.0, prompt: Any = 1, **more: Any) -> Request:
    """A waiting request; prompt: its ids, or how many."""
    ids = np.arange(prompt) if isinstance(prompt, int) else prompt
    return Request(Submit(id, pack_ids(ids), SamplingParams(), arrival=arrival, **more), (), 1)


def queue(name: str, *requests: Request) -> Any:
    policy = POLICIES.create(name)
    for one in requests:
        policy.add(one)
    return policy


def taken(policy: Any, count: int, now: float = 1.0, pace: float = 0.0, cached: dict[str, int] | None = None,
          charge: bool = False) -> list[str]:
    """The next `count` ids as a scheduler takes them, one in each step."""
    ids = []
    for _ in range(count):
        best = next(policy.order(View(lambda r: (cached or {}).get(r.id, 0), now, pace)))
        policy.remove(best)
        if charge:
            policy.charge(best.tenant, best.known, 0)
        ids.append(best.id)
    return ids


# ---- the contract

def test_a_policy_with_gaps_is_refused_and_every_gap_is_named():
    class Half(FirstComeFirstServed):
        def order(self):
            return iter(())
        charge = None

    registry = Registry("schedule policy", SchedulePolicy,
                        ("add", "remove", "order", "charge", "preempt", "victim"))
    with pytest.raises(RegistrationError, match="order.. lacks the parameters view.*charge.*is missing"):
        registry.register("half", Half)
    with pytest.raises(RegistrationError, match="registered already"):
        POLICIES.register("lpm", FirstComeFirstServed)


@pytest.mark.parametrize("name", POLICIES.names())
def test_each_is_given_once_and_those_sent_back_come_first(name):
    requests = [request(f"r{i}", 1.0 + i, 4 + i % 3, tenant="ab"[i % 2], priority=0) for i in range(40)]
    for turn, i in enumerate((9, 3)):
        requests[i].attempts, requests[i].turn = 1, turn
    policy = queue(name, *requests)
    order = [r.id for r in policy.order(View(lambda r: 0, 41.0))]
    assert len(order) == len(set(order)) == 40
    if name != "priority":  # there a request that was sent back has its place by what it is worth
        assert order[:2] == ["r9", "r3"]
    rest = taken(policy, 40, now=41.0)
    assert sorted(rest) == sorted(order)
    assert list(policy.order(View(lambda r: 0, 42.0))) == []
    assert all(r.ticket is None for r in requests), "an ended request would be kept by itself"


# ---- depth first

def test_depth_first_finishes_the_heaviest_branch():
    a, b = [1] * 8, [2] * 8
    requests = [request("a1", prompt=[*a, 5, 5]), request("b1", prompt=[*b, 5, 5]), request("b2", prompt=[*b, 6, 6]),
                request("a2", prompt=[*a, 6, 6]), request("b3", prompt=[*b, 6, 6, 7]), request("none", prompt=[9, 9])]
    cached = {"a1": 8, "a2": 8, "b1": 8, "b2": 10, "b3": 10}
    order = queue("dfs-weight", *requests).order(View(lambda r: cached.get(r.id, 0), 1.0))
    assert [r.id for r in order] == ["b2", "b3", "b1", "a1", "a2", "none"]


def test_depth_first_keeps_domains_apart():
    requests = [request("x1", prompt=[1] * 6, domain=b"x"), request("y1", prompt=[1] * 6, domain=b"y"),
                request("y2", prompt=[1] * 6, domain=b"y"), request("x2", prompt=[1] * 6, domain=b"x")]
    cached = dict.fromkeys(("x1", "x2", "y1", "y2"), 4)
    order = [r.id[0] for r in queue("dfs-weight", *requests).order(View(lambda r: cached[r.id], 1.0))]
    assert order in (["x", "x", "y", "y"], ["y", "y", "x", "x"])


def test_depth_first_goes_on_with_the_branch_it_has_begun():
    """One is taken in each step, and more come for the other branch meanwhile: it waits until this one is done."""
    a, b = [1] * 8, [2] * 8
    policy = queue("dfs-weight", *(request(f"a{i}", prompt=[*a, i]) for i in range(3)),
                   *(request(f"b{i}", prompt=[*b, i]) for i in range(2)))
    cached, got = {f"{x}{i}": 8 for x in "ab" for i in range(9)}, taken(policy, 1, cached={"a0": 8, "a1": 8, "a2": 8})
    for i in range(2, 6):
        policy.add(request(f"b{i}", prompt=[*b, i]))
        got += taken(policy, 1, cached=cached)
    assert got[:3] == ["a0", "a1", "a2"] and got[3][0] == got[4][0] == "b"


def test_depth_first_forgets_what_it_gave_and_nobody_took():
    """Who does not fit stays; the branch that was begun is the one of the last that was taken."""
    requests = [request(f"a{i}", prompt=[1, 1, i]) for i in range(3)] + [request("b0", prompt=[2, 2, 0])]
    policy = queue("dfs-weight", *requests)
    assert taken(policy, 1, cached=dict.fromkeys(("a0", "a1", "a2", "b0"), 2)) == ["a0"]
    next(policy.order(View(lambda r: 2, 1.0)))
    policy.remove(requests[3])
    assert taken(policy, 2, cached={"a1": 2, "a2": 2}) == ["a1", "a2"] and policy._given is None


# ---- shortest first

def test_the_shortest_prefill_first_and_cached_tokens_count():
    requests = [request("long", prompt=900), request("middle", prompt=300), request("cached", prompt=800)]
    assert taken(queue("shortest-first", *requests), 3, cached={"cached": 790}) == ["cached", "middle", "long"]


def test_a_long_prompt_is_passed_for_a_bounded_time():
    """Short requests come without end; the long one waits n / SPEED seconds and no longer."""
    long = request("long", 0.0, 4000)
    policy, now, i = queue("shortest-first", long), 0.0, 0
    while True:
        policy.add(request(f"r{i}", now, 10))
        if taken(policy, 1, now=now) == ["long"]:
            break
        now, i = now + 0.05, i + 1
        assert now < 10
    assert now == pytest.approx(4000 / SPEED, abs=0.1)


# ---- priority

def test_priority_ages():
    """A request of one level less is passed by those that come within LEVEL seconds of it, not by later ones."""
    requests = [request("low", 0.0), request("high", LEVEL - 1, priority=1), request("late", LEVEL + 1, priority=1)]
    assert taken(queue("priority", *requests), 3, now=LEVEL + 2) == ["high", "low", "late"]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("what", ["slots", "pages"])
def test_a_better_request_takes_the_place_of_a_worse_one(what, overlap):
    """The ledger is whole after every step, and the driver compares every token of both."""
    more = {"max_running": 2} if what == "slots" else {"max_running": 4, "pages": 22}
    run = Run(policy="priority", running_timeout=1e6, waiting_timeout=1e6, **more)
    for first in (0, 10):
        run.submit([*range(first, first + 20)], max_tokens=20, **LONG)
    for _ in range(6):
        run.step(overlap)
    high = run.submit([*range(20, 40)], priority=3, max_tokens=8, **LONG)
    while not run.tracks[high].finish:
        run.step(overlap)
    assert run.scheduler.stats.preemptions == 1
    assert not any(t.finish for rid, t in run.tracks.items() if rid != high), "nobody else had to end for it"
    run.finish()
    assert {t.finish for t in run.tracks.values()} == {"length"}


def crowded(*requests: tuple[int, int], pages: int) -> Run:
    """Running requests with these priorities and prompts of so many tokens, none of which ends soon or shares any."""
    run = Run(page=4, pages=pages, policy="priority", max_running=8, running_timeout=1e6, waiting_timeout=1e6)
    for i, (priority, size) in enumerate(requests):
        run.submit([*range(7 * i, 7 * i + size)], priority=priority, max_tokens=20, **LONG)
        run.step()
    assert run.scheduler.running == len(requests)
    return run


def must_go(run: Run, need: int, priority: int) -> int | None:
    """How many of the running requests, worst first, have to go until one that needs so many pages may start."""
    running, table = list(run.scheduler._running.values()), run.scheduler.table
    grows = [table.length[r.slot] > table.page_count[r.slot] * 4 for r in running]
    free = run.cache.available - need - sum(grows)
    for gone in range(len(running) + 1):
        if free > len(running) - gone or gone == len(running) and free >= 0:
            return gone
        worst = min(reversed([r for r in running if r.slot]), key=lambda r: r.priority, default=None)
        if worst is None or worst.priority >= priority:
            return None
        at = running.index(worst)
        free += int(table.page_count[worst.slot]) + grows[at]
        running[at] = request("gone", priority=99)
    return None


@pytest.mark.parametrize("prompt", range(1, 46, 4))
@pytest.mark.parametrize("others", [((5, 20), (0, 11), (0, 11), (0, 11)), ((5, 20), (5, 20), (0, 3), (0, 3)),
                                    ((0, 30), (1, 3), (2, 3), (5, 3))])
def test_as_many_give_way_as_it_takes_and_nobody_in_vain(others, prompt):
    run = crowded(*others, pages=sum(-(-size // 4) + 2 for _, size in others) + 2)
    high = run.submit([39 - i % 40 for i in range(prompt)], priority=3, max_tokens=2, **LONG)
    gone = must_go(run, -(-prompt // 4), 3)
    run.step()
    assert run.scheduler.stats.preemptions == (gone or 0)
    assert (high in [r.id for r in run.scheduler._running.values()]) == (gone is not None)
    run.finish()


def test_pages_that_better_ones_share_are_not_counted_as_set_free():
    """The worse one's prompt is that of one that stays, but for its end: giving way frees its own pages alone."""
    run = Run(page=4, pages=20, policy="priority", max_running=8, running_timeout=1e6, waiting_timeout=1e6)
    for priority, end in ((5, 1), (0, 2)):
        run.submit([*range(24), end], priority=priority, max_tokens=20, **LONG)
        run.step()
    run.submit([*range(40)][::-1], priority=3, max_tokens=2, **LONG)
    for _ in range(4):
        run.step()
        assert run.scheduler.stats.preemptions == 0
    run.finish()


def test_who_has_aged_is_not_sent_back():
    run = Run(policy="priority", max_running=1, running_timeout=1e6, waiting_timeout=1e6)
    run.submit([*range(20)], max_tokens=20, **LONG)
    run.step()
    run.wait(2 * LEVEL + 1)
    run.submit([*range(20, 40)], priority=2, max_tokens=2, **LONG)
    run.finish()
    assert run.scheduler.stats.preemptions == 0


def test_equals_do_not_preempt_each_other():
    run = Run(policy="priority", max_running=1)
    for first in range(3):
        run.submit([first] * 9, max_tokens=6, **LONG)
    run.finish()
    assert run.scheduler.stats.preemptions == 0


# ---- fair shares

def test_a_flood_of_one_tenant_does_not_delay_another():
    flood = [request(f"a{i}", 1.0 + i / 1000, 1000, tenant="a") for i in range(100)]
    policy = queue("fair", *flood)
    first = taken(policy, 5, now=2.0, charge=True)
    policy.add(request("b", 2.0, 1000, tenant="b"))
    after = taken(policy, 3, now=2.0, charge=True)
    assert first == ["a0", "a1", "a2", "a3", "a4"] and after[0] == "b"


def test_tenants_get_equal_tokens_however_they_cut_them():
    """One tenant asks for 100 tokens at a time, the other for 1,500: after any number of admissions they are at most
    a round and a request apart."""
    requests = [request(f"s{i}", 1.0, 100, tenant="small") for i in range(400)]
    requests += [request(f"l{i}", 1.0, 1500, tenant="large") for i in range(30)]
    policy, got = queue("fair", *requests), {"s": 0, "l": 0}
    for _ in range(200):
        (id,) = taken(policy, 1, now=2.0, charge=True)
        got[id[0]] += 100 if id[0] == "s" else 1500
        assert abs(got["s"] - got["l"]) <= QUANTUM + 1500
    assert min(got.values()) > 5 * QUANTUM


def test_output_counts_against_the_share():
    policy = queue("fair", request("a1", tenant="a"), request("b1", tenant="b"))
    policy.charge("a", 0, int(QUANTUM / OUTPUT_COST))
    assert taken(policy, 2) == ["b1", "a1"]


def test_inside_the_shares_the_longest_cached_prefix_goes_first():
    requests = [request("a1", tenant="a"), request("a2", tenant="a"), request("b1", tenant="b")]
    assert taken(queue("fair", *requests), 3, cached={"a2": 8, "b1": 4}) == ["a2", "b1", "a1"]


def test_within_a_tenant_nobody_is_passed_for_ever():
    requests = [request("old", 0.0, tenant="a"), request("new", AGED + 1, tenant="a")]
    assert taken(queue("fair", *requests), 2, now=AGED + 1, cached={"new": 99}) == ["old", "new"]


def test_debts_are_bounded_and_forgotten():
    policy = POLICIES.create("fair")
    for i in range(3 * TENANTS):
        policy.charge(f"t{i}", 10_000, 0)
    assert len(policy._share) == TENANTS
    policy.charge("idle", int(3 * QUANTUM), 0)
    for i in range(6):  # rounds in which only others ask
        policy.add(request(f"r{i}", prompt=int(QUANTUM), tenant="busy"))
        taken(policy, 1, charge=True)
    policy.add(request("idle-1", 1.0, tenant="idle"))
    policy.add(request("busy-1", 1.0, tenant="busy"))
    assert taken(policy, 1) == ["idle-1"]


def test_running_requests_are_charged_as_they_go():
    run = Run(policy="fair", max_running=2, pages=60, max_model_len=48)
    run.submit([1] * 8, tenant="a", max_tokens=40, **LONG)
    run.step()
    run.submit([2] * 8, tenant="b", max_tokens=2, **LONG)
    run.submit([3] * 8, tenant="b", max_tokens=2, **LONG)
    run.finish()
    share = run.scheduler._policy._share
    assert share["a"] == QUANTUM - 8 - OUTPUT_COST * 40 and share["b"] == QUANTUM - 16 - OUTPUT_COST * 4


# ---- deadlines

def test_the_earliest_deadline_first():
    requests = [request("none", 1.0), request("soon", 1.5, ttft=0.5), request("later", 1.0, ttft=5.0)]
    assert taken(queue("deadline", *requests), 3, now=1.6) == ["soon", "later", "none"]
    assert PATIENCE > 5


def test_what_cannot_be_in_time_does_not_make_others_late():
    """Each prompt takes 0.1 s. `lost` is late already, `long` would be at its end; both let `ok` go first."""
    requests = [request("lost", 0.0, 10, ttft=0.5), request("long", 1.0, 100, ttft=0.6),
                request("ok", 1.0, 10, ttft=1.0)]
    assert taken(queue("deadline", *requests), 3, now=1.0, pace=0.01) == ["ok", "lost", "long"]
    cached = {"long": 90}
    assert taken(queue("deadline", *requests), 3, now=1.0, pace=0.01, cached=cached) == ["long", "ok", "lost"]


def test_the_late_are_served_in_the_end():
    policy = queue("deadline", request("late", 0.0, ttft=0.1))
    for i in range(3 * LATE_SHARE):
        policy.add(request(f"r{i}", 9.0, ttft=5.0))
    served = []
    while "late" not in served:
        order = policy.order(View(lambda r: 0, 9.0))
        for best in order:
            policy.remove(best)
            served.append(best.id)
            policy.add(request(f"n{len(served)}", 9.0, ttft=5.0))
            if len(served) % 2:
                break
    assert len(served) <= 2 * LATE_SHARE
