"""Does the host leave a device waiting? A step's host work is counted in calls: times are in benchmarks/core."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from isthmus.core.config import CacheSettings, Config, ModelSettings, PlatformSettings, SchedulerSettings
from isthmus.core.engine import EngineCore
from isthmus.core.messages import SamplingParams, Submit, pack_ids

from .test_cache_costs import calls
from .tiny import tiny_model

COST = 30  # seconds

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "core" / "overlap.py"


def calls_of_a_step(requests: int) -> int:
    """Calls of the engine in a decode step of so many requests with stop strings: the median of 30 steps."""
    engine = EngineCore(Config(
        model=ModelSettings(str(tiny_model("llama3"))), cache=CacheSettings(kv_cache_memory="64MiB"),
        platform=PlatformSettings("null", ("delay_ms=0",)), scheduler=SchedulerSettings(max_running_requests=requests)))
    for i in range(requests):
        params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True, stop=("never",))
        engine.submit(Submit(f"r{i}", pack_ids([5 + i % 50, 6, 7, 8 + i // 50]), params))
    for _ in range(80):
        engine.step()
    assert engine.stats()["running"] == requests
    found = sorted(calls(engine.step) for _ in range(30))
    engine.close()
    return found[15]


def test_a_step_of_256_requests_takes_as_many_calls_as_one_of_8():
    few, many = calls_of_a_step(8), calls_of_a_step(256)
    assert many <= few + 16 < 400


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--no-grammar"], []])
def test_256_requests_with_stop_strings_stream_to_their_end_in_the_real_processes(tmp_path, more):
    """Without a JSON Schema and with one each. How busy the device was is for benchmarks to say."""
    words = [str(SCRIPT), "--requests", "256", "--waves", "6", *more, "--json", str(tmp_path / "out")]
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    found = json.loads((tmp_path / "out").read_text())
    assert found["full_steps"] > 40, "enough for a median"
    assert found["tokens"] > 6 * 256 * 190
    assert 0 <= found["idle_share"] < 1 and found["host_ms_median"] > 0
