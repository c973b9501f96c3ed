"""Replay against the hit rates that were measured on other engines, where the traces are."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from isthmus.core.replay.formats import read_trace
from isthmus.core.replay.run import Capacity, Order, replay
from isthmus.core.replay.trace import Trace

from .test_replay import quiet

COST = 10  # seconds
SHARED = Path(__file__).parents[2] / "shared" / "data"
ANCHORS = {  # token hit rates in percent at 1, 5, 10, 25 and 50 % of the working set
    "mooncake/conversation_trace.jsonl": {"lru-leaf": (5.2, 19.5, 27.9, 36.0, 37.0),
                                          "lru-block": (5.3, 19.8, 28.2, 36.0, 37.0),
                                          "optimal": (24.4, 37.3, 37.3, 37.3, 37.3)},
    "mooncake/synthetic_trace.jsonl": {"lru-leaf": (3.4, 15.1, 24.7, 44.3, 59.3),
                                       "lru-block": (3.6, 15.3, 25.4, 44.3, 59.3),
                                       "optimal": (17.9, 38.7, 50.3, 62.9, 65.0)},
    "traces/agent.bin": {"lru-leaf": (25.7, 66.2, 84.2, 88.8, 88.8), "lru-block": (29.4, 69.9, 84.9, 88.8, 88.8),
                         "optimal": (39.8, 77.6, 87.2, 88.8, 88.8)}}
PERCENT = tuple(Capacity(c, True) for c in (1, 5, 10, 25, 50))


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] if "conversation" in name else [])
                        for name in ANCHORS])
def anchored(request):
    if not (SHARED / request.param).is_file():
        pytest.skip(f"{request.param} is not beside this tree: it is too large to be kept in it")
    return request.param, read_trace(SHARED / request.param)


def rates(trace: Trace, policy: str, share: float = 0.0) -> list[float]:
    results = replay(trace, Order((policy,), PERCENT, share), quiet)["results"]
    return [100 * r["token_hit_rate"] for r in results]


def test_rows_of_the_anchors(anchored):
    name, trace = anchored
    for policy, want in ANCHORS[name].items():
        assert rates(trace, policy) == pytest.approx(want, abs=0.1), policy
    assert rates(trace, "lru") == pytest.approx(rates(trace, "lru-block"), abs=1e-9)


def test_the_default_holds_what_it_promises(anchored):
    name, trace = anchored
    gains = np.array(rates(trace, "default")) - rates(trace, "lru-leaf")
    assert gains.min() > -0.2, gains
    if name.startswith("mooncake/conv"):
        assert gains[0] >= 4 and gains[1] >= 1.5, gains
        hints = np.array(rates(trace, "default", 0.5)) - rates(trace, "lru-leaf")
        assert hints[1] >= 5, hints
