"""Where the time of a step goes: each part is counted where it is spent, and nothing between two steps counts."""
from __future__ import annotations

import pytest
from isthmus.core.scheduler import times
from isthmus.core.scheduler.times import DEVICE, FINISH, PARTS, SCHEDULE, StepTimes

from .test_engine import engine, run, submit  # noqa: F401

SLOW = 0.02  # seconds


def test_time_counts_for_the_part_that_was_entered_last(monkeypatch):
    now = iter((10.0, 11.0, 13.0, 20.0, 20.5))
    monkeypatch.setattr(times.time, "perf_counter", lambda: next(now))
    spent = StepTimes()
    spent.enter(SCHEDULE)
    spent.enter(DEVICE)
    spent.enter(None)
    spent.enter(FINISH)
    spent.enter(None)
    assert spent.snapshot() == {"step_schedule_seconds": 1.0, "step_device_seconds": 2.0, "step_finish_seconds": 0.5}
    spent.reset()
    assert set(spent.snapshot().values()) == {0.0}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("overlap", (True, False))
def test_the_engine_counts_each_part_where_it_is_spent(engine, monkeypatch, part, overlap):  # noqa: F811
    core, now = engine(overlap), [0.0]
    monkeypatch.setattr(times.time, "perf_counter", lambda: now[0])

    def takes_time():
        now[0] += SLOW

    def slow(owner, name):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            takes_time()
            return real(*args, **kwargs)
        monkeypatch.setattr(owner, name, call)

    if part == DEVICE:
        core._steps = {None: slow_step(core.device.compile(None, None, None), takes_time)}
    else:
        slow(core.scheduler, "plan" if part == SCHEDULE else "settle")
    assert core.command("stats")[f"step_{part}_seconds"] == 0
    submit(core, "a", [5, 6, 7], max_tokens=4)
    run(core)
    stats = core.command("stats")
    spent = {name: stats[f"step_{name}_seconds"] for name in PARTS}
    assert spent[part] > 3.9 * SLOW and all(spent[other] == 0 for other in PARTS if other != part), spent


def slow_step(step, takes_time):
    def run_slowly(state, batch):
        takes_time()
        return step(state, batch)
    return run_slowly
