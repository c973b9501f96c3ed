"""What repeated measurements show: ratios with intervals, and no winner inside the noise."""
from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .result import FIGURES

CONFIDENCE = 0.95
DRAWS = 2000
FEWEST_PAIRS = 6  # with fewer, all on one side have a chance of more than 1 in 20
FEWEST_RUNS = 5
NONE = "none"


@dataclass(frozen=True)
class Verdict:
    """How often A is as good as B in one figure: above 1 A is better, whichever way the figure counts.

    low, high: where the true ratio lies with `CONFIDENCE`; the same as `ratio` when there is no interval.
    a, b: medians.  winner: "A", "B" or "none", and `reason` why none.
    """

    figure: str
    a: float
    b: float
    ratio: float
    low: float
    high: float
    count: int
    winner: str
    reason: str = ""


def sign_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """An interval that holds the median of what the values were drawn from with at least `CONFIDENCE`, whatever their
    distribution: two order statistics, by the sign test. None when there are too few."""
    count, ordered, tail, found = len(values), sorted(values), 0.0, None
    for rank in range(count // 2):
        tail += math.comb(count, rank) * 0.5 ** count
        if 1 - 2 * tail < CONFIDENCE:
            break
        found = ordered[rank], ordered[count - 1 - rank]
    return found


def bootstrap_interval(a: Sequence[float], b: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """A percentile bootstrap of median(a) / median(b): two groups that were not measured in pairs (Efron 1979)."""
    draw = random.Random(seed)
    ratios = sorted(statistics.median(draw.choices(a, k=len(a))) / statistics.median(draw.choices(b, k=len(b)))
                    for _ in range(DRAWS))
    out = (1 - CONFIDENCE) / 2
    return ratios[int(out * DRAWS)], ratios[int((1 - out) * DRAWS) - 1]


def judge(figure: str, a: Sequence[float], b: Sequence[float], paired: bool, margin: float = 0.0) -> Verdict | None:
    """A beside B in a figure of `FIGURES`; pairs stand at the same place in both. margin: a winner must be better by
    more than this share. None for a figure that only describes, or one with zeros, of which there is no ratio."""
    if FIGURES[figure].better == 0 or not a or not b or min(*a, *b) <= 0:
        return None
    up, down = (a, b) if FIGURES[figure].better > 0 else (b, a)
    medians = statistics.median(a), statistics.median(b)
    if paired:
        ratios = [x / y for x, y in zip(up, down, strict=True)]
        ratio, interval = statistics.median(ratios), sign_interval(ratios)
        few = f"{len(a)} pairs are too few to tell, {FEWEST_PAIRS} are the least"
    else:
        ratio = statistics.median(up) / statistics.median(down)
        enough = min(len(a), len(b)) >= FEWEST_RUNS
        interval = bootstrap_interval(up, down) if enough else None
        few = f"{min(len(a), len(b))} runs are too few to tell, {FEWEST_RUNS} of each are the least"
    if interval is None:
        return Verdict(figure, *medians, ratio, ratio, ratio, len(a), NONE, few)
    low, high = interval
    winner = "A" if low > 1 + margin else "B" if high < 1 / (1 + margin) else NONE
    inside = "inside the noise" if low <= 1 <= high else f"by less than {margin:.0%}"
    return Verdict(figure, *medians, ratio, low, high, len(a), winner, inside if winner == NONE else "")


def without_ratio(a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Medians of both sides in the figures of which there is no ratio, as a run has 0, though the sides differ."""
    found = {}
    for name in (name for name in FIGURES if FIGURES[name].better and all(name in run for run in (*a, *b))):
        sides = [sorted(run[name] for run in side) for side in (a, b)]
        if min(sides[0][0], sides[1][0]) <= 0 and sides[0] != sides[1] and not name.endswith("_mean"):
            found[name] = statistics.median(sides[0]), statistics.median(sides[1])
    return found


def judge_all(a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]], paired: bool,
              margin: float = 0.0) -> list[Verdict]:
    """Every figure that all of both sides' runs have; means say no more than percentiles, and seconds than rates."""
    names = [name for name in FIGURES if a and b and all(name in run for run in (*a, *b))
             and name != "seconds" and not name.endswith("_mean")]
    found = (judge(name, [run[name] for run in a], [run[name] for run in b], paired, margin) for name in names)
    return [verdict for verdict in found if verdict is not None]
