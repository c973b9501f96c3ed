"""The chaos of `tests/chaos.py`, short: the whole one kills 100 times."""
from __future__ import annotations

import sys

import pytest

from .chaos import chaos
from .effort import SOON

COST = 120  # seconds


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the processes' memory maps")
def test_killed_processes_cost_what_was_running_and_nothing_else():
    result = chaos(times=8, answer_s=SOON)
    assert not result["problems"], result
    assert sum(result["kills"].values()) >= 8
