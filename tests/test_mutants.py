"""Negative controls: the driver must catch every seeded bug of mutants.py."""
from __future__ import annotations

import pytest

from .mutants import SCHEDULER, Mutant
from .scheduling import random_run

COST = 15  # seconds

CAUGHT = (AssertionError, LookupError, ValueError)  # a check, or a crash: either fails a test


@pytest.mark.parametrize("mutant", SCHEDULER, ids=lambda m: m.name)
def test_scheduler_mutant_is_caught(mutant: Mutant, monkeypatch):
    mutant.apply(monkeypatch)
    with pytest.raises(CAUGHT):
        for seed in range(mutant.seed, mutant.seed + 40):
            random_run(seed, 80)
