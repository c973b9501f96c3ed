"""Policies against each other on one trace: hit rates, and, with a latency model, what clients wait for."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..cache.eviction import EVICTION
from ..config import CacheSettings
from ..errors import ConfigError
from ..scheduler.stats import WINDOW
from ..suggest import suggest
from .cached import cached_blocks
from .latency import LatencyModel
from .peers import PEERS, Tick
from .served import Served, check_lengths, serve
from .trace import Trace

DEFAULT = "default"  # stands for what `--eviction-policy` is unless it is set
COMPARED = (DEFAULT, "lru-leaf", "lru-block", "optimal")
PERCENTILES = (50, 90, 99)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Capacity:
    """As it was given: `value` percent of a trace's working set, or tokens."""

    value: float
    percent: bool

    def blocks(self, trace: Trace) -> int:
        """Whole blocks of the trace, at least one."""
        size = self.value / 100 * trace.unique if self.percent else self.value / trace.block
        return max(1, int(size + 1e-9))

    def __str__(self) -> str:
        return f"{self.value:g} %" if self.percent else f"{self.value:,.0f} tokens"


@dataclass(frozen=True)
class Order:
    """What to run. hint_endings: share of the requests whose text nobody asks for again that say so; drawn by `seed`.

    ttft, tpot: seconds, the limits that goodput is counted under. model None: hit rates only.
    """

    policies: tuple[str, ...]
    capacities: tuple[Capacity, ...]
    hint_endings: float = 0.0
    seed: int = 0
    model: LatencyModel | None = None
    schedule: str = "lpm"
    ttft: float = 2.0
    tpot: float = 0.1


def check_policies(names: Sequence[str]) -> None:
    """Raises `ConfigError` for a name that is neither an eviction policy nor one to compare with."""
    known = [DEFAULT, *PEERS, *EVICTION]
    for name in names:
        if name not in known:
            raise ConfigError(f"--policy {name} is not one of {', '.join(known)}{suggest(name, known)}")


def hinted(trace: Trace, share: float, seed: int) -> np.ndarray:
    """Requests that say that their session ends: those that the trace names, and `share` of those that do end."""
    return trace.hinted | trace.dead_ends() & (np.random.default_rng(seed).random(len(trace)) < share)


def replay(trace: Trace, order: Order, progress: Progress) -> dict[str, Any]:
    """Everything there is to say, as plain data; `results` has one entry for each policy and capacity.

    Rates are shares of all prompt tokens: `token_hit_rate` over all requests, the first among them too, and
    `token_hit_rate_window` over the last 1,000. Raises `TraceError` for a request too long to be served.
    """
    if order.model is not None:
        check_lengths(trace, order.model)
    ends = hinted(trace, order.hint_endings, order.seed)
    results = [_one(trace, order, capacity, policy, ends, progress)
               for capacity in order.capacities for policy in order.policies]
    seen = np.minimum(trace.seen_before() * trace.block, trace.inputs)
    return {"trace": trace.name, "requests": len(trace), "form": trace.form, "block_tokens": trace.block,
            "input_tokens": int(trace.inputs.sum()), "working_set_tokens": trace.working_set,
            "seconds": float(trace.arrival[-1]), "token_hit_rate_of_endless_cache": _share(seen, trace.inputs),
            "hint_endings": order.hint_endings, "hinted_requests": int(ends.sum()), "seed": order.seed,
            "default_policy": CacheSettings().eviction_policy, "results": results}


def _one(trace: Trace, order: Order, capacity: Capacity, policy: str, ends: np.ndarray,
         progress: Progress) -> dict[str, Any]:
    blocks, stage = capacity.blocks(trace), f"{policy} at {capacity}"
    tick = _ticker(stage, len(trace), progress)
    eviction = CacheSettings().eviction_policy if policy == DEFAULT else policy
    run = PEERS[policy] if policy in PEERS else partial(cached_blocks, policy=eviction, ends=ends)
    hits = np.minimum(run(trace, blocks, tick) * trace.block, trace.inputs)
    half = len(trace) // 2
    result = {"policy": policy, "eviction_policy": None if policy in PEERS else eviction,
              "capacity": int(capacity.value) if capacity.value == int(capacity.value) else capacity.value,
              "capacity_unit": "percent" if capacity.percent else "tokens", "capacity_tokens": blocks * trace.block,
              "token_hit_rate": _share(hits, trace.inputs),
              "token_hit_rate_window": _share(hits[-WINDOW:], trace.inputs[-WINDOW:]),
              "token_hit_rate_second_half": _share(hits[half:], trace.inputs[half:])}
    if order.model is not None and policy not in PEERS:
        tick = _ticker(f"{stage}, served", len(trace), progress)
        served = serve(trace, blocks, tick, eviction, ends, order.model, order.schedule)
        result["served"] = _told(served, order)
    return result


def _told(served: Served, order: Order) -> dict[str, Any]:
    """What clients saw, and both hit rates as the scheduler counts them: retracted requests apart."""
    rate, share = served.goodput(order.ttft, order.tpot)
    counted = served.counters
    again = counted["reprefill_tokens"]
    return {"ttft_s": _percentiles(served.ttft), "itl_s": _percentiles(served.itl), "tpot_s": _percentiles(served.tpot),
            "goodput_rps": rate, "goodput_share": share, "slo": {"ttft_s": order.ttft, "tpot_s": order.tpot},
            "seconds": served.seconds, "refused": served.refused, "preemptions": counted["preemptions"],
            "token_hit_rate": counted["hit_rate_total"], "token_hit_rate_window": counted["hit_rate_window"],
            "token_hit_rate_preempted": counted["reprefill_cached_tokens"] / again if again else None}


def _percentiles(values: np.ndarray) -> dict[str, float | None]:
    values = values[~np.isnan(values)]
    return {f"p{p}": float(np.percentile(values, p)) if len(values) else None for p in PERCENTILES}


def _share(part: np.ndarray, whole: np.ndarray) -> float:
    return float(part.sum() / whole.sum()) if whole.sum() else 0.0


def _ticker(stage: str, total: int, progress: Progress) -> Tick:
    def tick(done: int) -> None:
        if not done & 255:
            progress(stage, done, total)
    return tick
