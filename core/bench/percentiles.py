"""Percentiles of what was timed, and what a run looked like over its time, both in memory that does not grow."""
from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

QUANTILES = (50, 90, 95, 99)


def nearest_rank(ordered: Sequence[float], q: float) -> float:
    """The smallest of the ascending values that at least `q` percent of them do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * q / 100) - 1)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, nearest-rank percentiles and maximum; {} of nothing."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {"mean": sum(ordered) / len(ordered), **{f"p{q}": nearest_rank(ordered, q) for q in QUANTILES},
            "max": ordered[-1]}


class Sketch:
    """Percentiles of any number of values, each within `ERROR` of the true one: counts in bins whose bounds grow by a
    constant factor (Masson, Rim and Lee 2019, DDSketch). Values below `LEAST` count as that, above `MOST` as this."""

    ERROR, LEAST, MOST = 0.005, 1e-6, 1e5
    GROWTH = math.log((1 + ERROR) / (1 - ERROR))

    def __init__(self) -> None:
        self.bins = array("Q", bytes(8 * (int(math.log(self.MOST / self.LEAST) / self.GROWTH) + 2)))
        self.count, self.total, self.most = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.most = max(self.most, value)
        inside = min(max(value, self.LEAST), self.MOST)
        self.bins[math.ceil(math.log(inside / self.LEAST) / self.GROWTH)] += 1

    def quantile(self, q: float) -> float:
        """As `nearest_rank` of all values, within `ERROR` of it. Not for an empty one."""
        rank, seen = max(1, math.ceil(self.count * q / 100)), 0
        for number, held in enumerate(self.bins):
            seen += held
            if seen >= rank:
                middle = self.LEAST * math.exp(self.GROWTH * number) * (1 - self.ERROR)
                return min(middle, self.most)
        raise AssertionError("the bins hold all values")

    def summary(self) -> dict[str, float]:
        """As `summary` of all values."""
        if not self.count:
            return {}
        return {"mean": self.total / self.count, **{f"p{q}": self.quantile(q) for q in QUANTILES}, "max": self.most}


class Timeline:
    """Amounts by time from 0 on, in at most `PLACES` spans of equal length, which doubles as the run goes on."""

    PLACES = 128

    def __init__(self, span: float = 0.05) -> None:
        self.span, self.amounts = span, [0.0] * self.PLACES

    def add(self, when: float, amount: float) -> None:
        while when >= self.span * self.PLACES:
            pairs = zip(self.amounts[::2], self.amounts[1::2], strict=True)
            self.amounts = [a + b for a, b in pairs] + [0.0] * (self.PLACES // 2)
            self.span *= 2
        self.amounts[max(0, int(when / self.span))] += amount

    def rates(self, seconds: float) -> list[float]:
        """Amounts a second in each span of a run of so many seconds, the last one by the part that belongs to it."""
        places = min(self.PLACES, max(1, math.ceil(seconds / self.span)))
        last = max(seconds - (places - 1) * self.span, 1e-9)
        return [amount / (self.span if i < places - 1 else last) for i, amount in enumerate(self.amounts[:places])]
