"""The cache under every order of operations that Hypothesis finds, beside a model that is exact in every page number.

100,000 steps when slow tests run; CACHE_MACHINE_STEPS sets another number, as a nightly run's million does. Negative
controls are in test_cache_mutants.py.
"""
from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from isthmus.core.cache import pool

from .cache_machine import CacheMachine
from .lru_run import lru_run

COST = 10  # seconds
STEPS = 40  # of one example

TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=STEPS, deadline=None)


@pytest.mark.slow
def test_many_steps():
    steps = int(os.environ.get("CACHE_MACHINE_STEPS", "100000"))
    many = settings(max_examples=steps // STEPS, stateful_step_count=STEPS, deadline=None, database=None,
                    phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(CacheMachine, settings=many)


def test_pages_that_follow_each_other_are_found_by_a_slice(monkeypatch):
    """As for many: the machine has a few pages only."""
    monkeypatch.setattr(pool, "_MANY", 1)
    monkeypatch.setattr(pool, "_FEW", -1)  # no release is made of single pages
    run_state_machine_as_test(CacheMachine, settings=TestCache.settings)


@pytest.mark.parametrize("seed", range(8))
def test_least_recently_used_beside_the_plainest_form_of_it(seed: int):
    lru_run(seed, 1000)
