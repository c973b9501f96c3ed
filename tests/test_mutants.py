"""Negative controls: the machines and the driver must catch every seeded bug of mutants.py."""
from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import run_state_machine_as_test

from .cache_machine import CacheMachine
from .mutants import CACHE, SCHEDULER, Mutant
from .scheduling import random_run

COST = 15  # seconds

SEARCH = settings(max_examples=400, stateful_step_count=40, deadline=None, database=None, derandomize=True,
                  phases=[Phase.generate], report_multiple_bugs=False, suppress_health_check=list(HealthCheck))
CAUGHT = (AssertionError, LookupError, ValueError, FlakyFailure)  # a check, or a crash: either fails a test


@pytest.mark.parametrize("mutant", CACHE, ids=lambda m: m.name)
def test_cache_mutant_is_caught(mutant: Mutant, monkeypatch):
    mutant.apply(monkeypatch)
    with pytest.raises(CAUGHT):
        run_state_machine_as_test(CacheMachine, settings=SEARCH)


@pytest.mark.parametrize("mutant", SCHEDULER, ids=lambda m: m.name)
def test_scheduler_mutant_is_caught(mutant: Mutant, monkeypatch):
    mutant.apply(monkeypatch)
    with pytest.raises(CAUGHT):
        for seed in range(mutant.seed, mutant.seed + 40):
            random_run(seed, 80)
