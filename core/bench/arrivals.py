"""When requests come in an open loop: seconds from the start of the run, without end unless a trace has one."""
from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

KINDS = ("poisson", "constant")


def arrivals(kind: str, rate: float, seed: int) -> Iterator[float]:
    """Times at which requests are due, `rate` a second on average, the first at 0. "constant": evenly spaced;
    "poisson": gaps drawn from the exponential distribution, as of many users who know nothing of each other."""
    if kind == "constant":
        return (number / rate for number in itertools.count())
    draw = random.Random(seed)
    gaps = (draw.expovariate(rate) for _ in itertools.repeat(None))
    return itertools.accumulate(gaps, initial=0.0)
