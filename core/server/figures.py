"""Numbers that `isthmus top`, the dashboard and the metrics share, from what the engine counts."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..scheduler.times import PARTS

COUNTED = ("pages_free", "pages_cached", "pages_evictable", "pages_used", "pages_quarantined")


def pages_by_owner(stats: Mapping[str, Any]) -> dict[str, int]:
    """Pages of K and V by who holds them, together the whole pool; {} while the engine gives no numbers.

    requests: of running requests alone. cache_used: cached, and used by a running request. cache_idle: cached, given up
    when memory is short. quarantine: out of use after an ownership error.
    """
    if not all(name in stats for name in COUNTED):
        return {}
    free, cached, idle, used, quarantine = (stats[name] for name in COUNTED)
    return {"requests": used - (cached - idle) - quarantine, "cache_used": cached - idle, "cache_idle": idle,
            "free": free, "quarantine": quarantine}


def step_seconds(stats: Mapping[str, Any]) -> dict[str, float]:
    """Seconds that steps took, summed, by part; {} while the engine gives no numbers."""
    return {part: stats[name] for part in PARTS if (name := f"step_{part}_seconds") in stats}
