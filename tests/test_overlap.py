"""Does the host leave a device waiting? In processor time: on a busy machine the clock says nothing."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COST = 60  # seconds

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "core" / "overlap.py"


@pytest.mark.slow
def test_all_that_the_scheduler_does_for_a_step_of_256_requests_fits_into_the_step_before(tmp_path):
    """With stop strings, streaming and a hook that costs what a grammar does, in the real processes."""
    subprocess.run([sys.executable, str(SCRIPT), "--json", str(tmp_path / "out")], check=True, capture_output=True)
    found = json.loads((tmp_path / "out").read_text())
    assert found["full_steps"] > 200 and found["tokens"] == 2 * 256 * 200
    assert found["host_ms_median"] < 2.5, "half of a step of 5 ms"
