"""The scheduler against a model of lists: without a prefix cache every plan can be foretold, range by range."""
from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from isthmus.core.scheduler.plans import Plan

from .scheduling import Run

COST = 12  # seconds


class Model:
    """First come, first served, as one would write it down. A request is a dict; nothing is fast or shared."""

    def __init__(self, slots: int, pages: int, page: int, chunk: int):
        self.slots, self.free, self.page, self.chunk = slots, pages, page, chunk
        self.waiting, self.running, self.decoding, self.flight, self.turns = [], [], [], [], 0

    def submit(self, id: str, prompt: int, most: int, priority: int) -> None:
        self.waiting.append(dict(id=id, known=prompt, end=prompt + most, priority=priority, turn=0, pages=0))

    def drop(self, r: dict) -> None:
        self.free, r["pages"] = self.free + r["pages"], 0
        for group in (self.waiting, self.running, self.decoding):
            if r in group:
                group.remove(r)

    def abort(self, id: str) -> None:
        for r in [r for r in self.waiting + self.running if r["id"] == id]:
            self.drop(r)
            r["end"] = -1

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def admit(self, r: dict) -> bool:
        need = self.pages(r["known"])
        if len(self.running) == self.slots or self.running and len(self.running) >= self.free - need:
            return False
        self.waiting.remove(r)
        if need > self.free:
            return False
        self.turns += not r["turn"]
        r.update(pages=need, computed=0, turn=r["turn"] or self.turns)
        self.free -= need
        self.running.append(r)
        return True

    def cut(self, requests: list[dict], budget: int, cut: list) -> int:
        for r in requests:
            stop = min(r["known"], r["computed"] + budget)
            if stop > r["computed"]:
                cut.append((r, r["computed"], stop))
            budget, r["computed"] = budget - stop + r["computed"], stop
        return budget

    def plan(self) -> list[tuple[str, int, int]]:
        ranges, retracted, budget = [], False, self.chunk
        while True:
            decode = [r for r in self.decoding if r["known"] < r["end"]]
            short = [r for r in decode if r["pages"] < self.pages(r["known"])]
            if len(short) <= self.free:
                break
            victim = min(reversed(self.running), key=lambda r: r["priority"])
            self.drop(victim)
            if self.running:
                self.waiting.append(victim)
                retracted = True
        for r in short:
            r["pages"], self.free = r["pages"] + 1, self.free - 1
        ranges += [(r["id"], r["known"] - 1, r["known"]) for r in decode]
        chunks = [r for r in self.running if r not in self.decoding]
        self.waiting.sort(key=lambda r: (0, r["turn"]) if r["turn"] else (1, -r["priority"]))
        first, cut = chunks[0] if chunks else None, []
        if first and first["known"] - first["computed"] > budget:
            share, need = budget // 2, (first["known"] - first["computed"] - 1) // 2
            able = lambda r: r["priority"] >= first["priority"] and r["known"] - r.get("computed", 0) <= need  # noqa: E731
            early = sorted(filter(able, chunks), key=lambda r: r["known"] - r["computed"])
            share = self.cut(early, share, cut)
            for r in [] if retracted else [r for r in self.waiting if r.update(computed=0) or able(r)]:
                if share <= 0 or not self.admit(r):
                    break
                share = self.cut([r], share, cut)
            budget -= sum(stop - start for _, start, stop in cut)
        while not retracted and sum(r["known"] - r["computed"] for r in chunks) < budget and self.waiting:
            r = self.waiting[0]
            if not self.admit(r):
                break
            chunks.append(r)
        self.cut([r for r in chunks if r not in [c[0] for c in cut]], budget, cut)
        cut.sort(key=lambda c: c[2] - c[1] > 1)
        ready = [r for r, _, stop in cut if stop == r["known"]]
        self.decoding += ready
        for r in decode + ready:
            r["known"] += 1
        self.flight.append([(r, r["known"]) for r in decode + ready])
        return ranges + [(r["id"], start, stop) for r, start, stop in cut]

    def settle(self) -> None:
        for r, known in self.flight.pop(0):
            if known == r["end"]:
                self.drop(r)


def watched(run: Run, had: list[tuple[str, int, int]]) -> Callable[[Plan], None]:
    """`Scheduler.advance` that notes the ranges of the plan."""
    advance, table = run.scheduler.advance, run.scheduler.table

    def note(plan: Plan) -> None:
        had.extend((table.owner[r.request].id, r.start, r.stop) for r in plan.record().ranges)
        advance(plan)
    return note


def compare(seed: int, steps: int) -> tuple[int, int]:
    """(steps with a plan, retractions) of a random run in which both had to agree on everything."""
    rng = random.Random(seed)
    page, chunk, slots = rng.choice((1, 2, 4)), rng.choice((4, 12, 40)), rng.choice((2, 6))
    pages = rng.randint(48 // page, 96 // page)
    run = Run(page, pages + 1, "fcfs", prefix_cache=False, chunk=chunk, max_running=slots, max_queued=1000, foresight=0,
              waiting_timeout=1e9, running_timeout=1e9)
    model, planned, ids = Model(slots, pages, page, chunk), 0, []
    for _ in range(steps):
        if rng.random() < 0.3:
            prompt, most, priority = rng.randint(1, 24), rng.randint(1, 20), rng.choice((0, 0, 1))
            ids.append(run.submit([rng.randrange(40) for _ in range(prompt)], priority=priority, max_tokens=most,
                                  ignore_eos=True))
            model.submit(ids[-1], prompt, most, priority)
        if rng.random() < 0.05 and ids:
            run.abort(id := rng.choice(ids[-8:]))
            model.abort(id)
        before, wanted, had = run.flight, model.plan(), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run.scheduler, "advance", watched(run, had))
            run.step()
        assert had == wanted
        if not wanted:
            model.flight.pop()
        if before:
            model.settle()
        assert run.cache.pool.free == model.free and run.scheduler.waiting == len(model.waiting)
        planned += bool(wanted)
    run.finish()
    return planned, run.scheduler.stats.preemptions


def test_every_plan_is_as_foretold():
    done = [compare(seed, 120) for seed in range(25)]
    assert sum(planned for planned, _ in done) > 2000 and sum(retracted for _, retracted in done) > 50


@pytest.mark.slow
def test_every_plan_is_as_foretold_for_long():
    done = [compare(seed, 1000) for seed in range(1000, 1012)]
    assert sum(retracted for _, retracted in done) > 150
