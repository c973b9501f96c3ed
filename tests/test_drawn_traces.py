"""The default eviction policy on traces drawn to defeat it: never far below the least recently used order."""
from __future__ import annotations

import pytest
from isthmus.core.replay.run import Capacity, Order, replay

from .drawn_traces import DRAWN, drawn
from .test_replay import quiet

COST = 8  # seconds
FAR = 0.2  # points of the token hit rate


def behind(name: str, requests: int, seed: int, *percent: float) -> list[float]:
    """Points that the default is below LRU by leaf, at each capacity."""
    order = Order(("default", "lru-leaf"), tuple(Capacity(share, True) for share in percent))
    rates = [100 * r["token_hit_rate"] for r in replay(drawn(name, requests, seed), order, quiet)["results"]]
    return [leaf - ours for ours, leaf in zip(rates[::2], rates[1::2], strict=True)]


@pytest.mark.parametrize("name", ["recency", "delay", "moods", "loops"])
def test_the_default_is_never_far_below_lru(name):
    assert max(behind(name, 6000, 0, 1)) < FAR


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", DRAWN)
def test_the_default_is_never_far_below_lru_on_any(name, seed):
    assert max(behind(name, 16_000, seed, 1, 5)) < FAR
