"""Negative controls of the cache: its state machine and the runs of LRU must catch every bug of cache_mutants.py."""
from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import run_state_machine_as_test

from .cache_machine import CacheMachine
from .cache_mutants import CACHE, LRU
from .lru_run import lru_run
from .mutants import Mutant

COST = 60  # seconds

SEARCH = settings(max_examples=400, stateful_step_count=40, deadline=None, database=None, derandomize=True,
                  phases=[Phase.generate], report_multiple_bugs=False, suppress_health_check=list(HealthCheck))
CAUGHT = (AssertionError, LookupError, ValueError, FlakyFailure)  # a check, or a crash: either fails a test


@pytest.mark.parametrize("mutant", CACHE, ids=lambda m: m.name)
def test_cache_mutant_is_caught(mutant: Mutant, monkeypatch):
    mutant.apply(monkeypatch)
    with pytest.raises(CAUGHT):
        run_state_machine_as_test(CacheMachine, settings=SEARCH)


@pytest.mark.parametrize("mutant", LRU, ids=lambda m: m.name)
def test_lru_mutant_is_caught(mutant: Mutant, monkeypatch):
    mutant.apply(monkeypatch)
    with pytest.raises(CAUGHT):
        for seed in range(20):
            lru_run(seed, 500)
