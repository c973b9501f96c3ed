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
@pytest.mark.parametrize(("requests", "more", "most"), [(256, ["--no-grammar"], 2.5), (64, [], 5.0)])
def test_all_that_the_scheduler_does_for_a_step_fits_into_the_step_before(tmp_path, requests, more, most):
    """With stop strings and streaming, in the real processes: 256 requests, and 64 that have a JSON Schema each."""
    words = [str(SCRIPT), "--requests", str(requests), "--waves", "6", *more, "--json", str(tmp_path / "out")]
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    found = json.loads((tmp_path / "out").read_text())
    assert found["full_steps"] > 40, "enough for a median"
    assert found["tokens"] > 6 * requests * 190
    assert found["host_ms_median"] < most, "of a step of 5 ms"
