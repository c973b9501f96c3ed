"""The scheduler under every order of events that Hypothesis finds, and 100,000 random steps.

The oracle, the shadow of every slot and the checks at the end are in scheduling.py; negative controls in
test_mutants.py.
"""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from isthmus.core.scheduler.policy import POLICIES

from .scheduling import DOMAINS, MAX_LEN, PARAMS, VOCAB, Run, random_run

COST = 12  # seconds
STEPS = int(os.environ.get("SCHEDULER_MACHINE_STEPS", "100000"))  # nightly: a million


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are what clients, administrators, clock and device can do."""

    @initialize(page=st.sampled_from([1, 2, 4, 16]), spare=st.integers(0, 20), policy=st.sampled_from(POLICIES.names()),
                late=st.booleans(), padded=st.booleans(), prefix_cache=st.sampled_from([True, True, True, False]))
    def begin(self, page: int, spare: int, policy: str, late: bool, padded: bool, prefix_cache: bool) -> None:
        self.run = Run(page, MAX_LEN // page + 1 + spare, policy, late, padded, prefix_cache)

    @rule(base=st.integers(0, 11), keep=st.integers(0, 30), more=st.lists(st.integers(0, 3), min_size=1, max_size=12),
          domain=st.sampled_from(DOMAINS), priority=st.sampled_from([0, 0, 0, 1]), tenant=st.sampled_from(["", "a"]),
          params=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in PARAMS.items()}))
    def submit(self, base: int, keep: int, more: list[int], domain: bytes, priority: int, tenant: str,
               params: dict[str, Any]) -> None:
        history = self.run.history[base % len(self.run.history)]
        self.run.submit([*history[:keep], *more], domain, priority, tenant, **params)

    @rule(count=st.integers(2, 5), length=st.integers(1, 16))
    def crowd(self, count: int, length: int) -> None:
        """Long plain requests at once: memory becomes short."""
        for i in range(count):
            self.run.submit([i % VOCAB] * length, max_tokens=40, ignore_eos=True)

    @precondition(lambda self: self.run.tracks)
    @rule(pick=st.integers(0, 20))
    def abort(self, pick: int) -> None:
        ids = list(self.run.tracks)
        self.run.abort(ids[-1 - pick % len(ids)])

    @rule(count=st.integers(1, 6), overlap=st.booleans())
    def steps(self, count: int, overlap: bool) -> None:
        for _ in range(count):
            self.run.step(overlap)

    @rule(kind=st.sampled_from(["build", "launch", "collect"]))
    def fail_next(self, kind: str) -> None:
        self.run.fail_next(kind)

    @rule()
    def flush(self) -> None:
        self.run.flush()

    @rule(seconds=st.sampled_from([1.0, 7.0, 21.0]))
    def wait(self, seconds: float) -> None:
        self.run.wait(seconds)

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.finish()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_random_runs():
    runs = [random_run(seed, 60) for seed in range(20)]
    assert sum(run.scheduler.stats.preemptions for run in runs) > 20, "memory was never short"
    assert sum(run.cache.evicted_pages for run in runs) > 100, "nothing was evicted"
    assert sum(run.scheduler.stats.cached_tokens for run in runs) > 250, "nothing was shared"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_hundred_thousand_steps(part):
    """No page lost, duplicated or written after release, with random aborts, retractions, evictions and failures."""
    launched = preemptions = evicted = 0
    reasons: dict[str, int] = {}
    for seed in range(25):
        run = random_run(1000 + 25 * part + seed, STEPS // 250)
        launched += run.launched
        preemptions += run.scheduler.stats.preemptions
        evicted += run.cache.evicted_pages
        for reason, count in run.scheduler.stats.finish_reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    assert launched >= STEPS // 10
    assert preemptions > 100 and evicted > 1000
    assert all(reasons[reason] > 50 for reason in ("stop", "length", "abort", "error"))


def test_a_night_runs_what_is_there():
    """A million steps each: of scripts and settings that exist."""
    root = Path(__file__).resolve().parent.parent
    job = yaml.safe_load((root / ".github/workflows/nightly.yml").read_text())["jobs"]["core"]
    scripts = [word for each in job["strategy"]["matrix"]["include"] for word in each["run"].split() if ".py" in word]
    assert len(scripts) == 5 and all((root / script).is_file() for script in scripts)
    texts = "".join((root / script).read_text() for script in scripts)
    assert job["env"] and all(f'"{name}"' in texts and value == "1000000" for name, value in job["env"].items())
