"""A trace through the real scheduler and cache, with a virtual clock: what a client would have waited for.

There is no device: a step takes what the latency model says, and every request samples a token of its own.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cache.manager import CacheManager
from ..messages import SamplingParams, Submit, pack_ids
from ..plan import StepResult
from ..scheduler.admission import Limits
from ..scheduler.plans import Plan
from ..scheduler.scheduler import Scheduler
from .cached import ENDS
from .latency import LatencyModel
from .peers import Tick
from .trace import Trace, TraceError

FOREVER = 1e12
MAX_LENGTH = 2**22  # tokens of a prompt and its output
MAX_TABLE = 2**31   # tokens that the scheduler has places for: the longest request as often as requests run at once


@dataclass(frozen=True)
class Served:
    """ttft, tpot: seconds to the first token and between tokens on average, float64 [n]; NaN where there was none.

    itl: seconds between any two tokens of a request, float64. seconds: how long it all took. refused: requests that
    could not run. counters: `SchedulerStats.snapshot()`.
    """

    ttft: np.ndarray
    tpot: np.ndarray
    itl: np.ndarray
    seconds: float
    refused: int
    counters: dict[str, Any]

    def goodput(self, ttft: float, tpot: float) -> tuple[float, float]:
        """Requests within both limits, in seconds: (a second, as a share of all)."""
        good = int(np.count_nonzero((self.ttft <= ttft) & ~(self.tpot > tpot)))
        return good / self.seconds if self.seconds else 0.0, good / len(self.ttft)


class _Clients:
    """When the tokens of each request came."""

    def __init__(self, trace: Trace, slots: int):
        self.arrival = trace.arrival
        self.first, self.last = np.full(len(trace), np.nan), np.full(len(trace), np.nan)
        self.count = np.zeros(len(trace), np.int64)
        self.gaps: list[np.ndarray] = []
        self._of_slot = np.zeros(slots, np.int64)

    def got(self, plan: Plan, now: float) -> None:
        """The tokens of a step are there."""
        for chunk in plan.chunks:
            if chunk.sample:
                self._of_slot[chunk.slot] = int(chunk.request.id)
        slots = np.concatenate([plan.decode, [c.slot for c in plan.chunks if c.sample]]).astype(np.int64)
        who = self._of_slot[slots]
        old = who[self.count[who] > 0]
        self.gaps.append(now - self.last[old])
        self.first[who] = np.where(self.count[who] > 0, self.first[who], now)
        self.last[who] = now
        self.count[who] += 1


def check_lengths(trace: Trace, model: LatencyModel) -> None:
    """Raises `TraceError` that names the longest request when the scheduler has no place for it."""
    lengths = trace.inputs + trace.outputs
    longest, most = int(lengths.argmax()), min(MAX_LENGTH, MAX_TABLE // (model.max_running + 1))
    if lengths[longest] > most:
        raise TraceError(f"{trace.name}: request {longest + 1} by arrival: a prompt of {trace.inputs[longest]} tokens "
                         f"and an output of {trace.outputs[longest]} are more than the {most} together that --latency "
                         f"runs with max_running {model.max_running}: take it out, or leave --latency out")


def serve(trace: Trace, capacity: int, tick: Tick, policy: str, ends: np.ndarray, model: LatencyModel,
          schedule: str) -> Served:
    """Run all requests at their times. capacity: pages of `trace.block` tokens. policy, schedule: of eviction and
    scheduling. ends: requests that are hinted to end their session, bool [n]. tick is told how many have ended."""
    longest = int((trace.inputs + trace.outputs).max()) + 2
    own = trace.unique  # the token of a request's text that is no whole block, and of its output: own + its number
    limits = Limits(model.max_running, len(trace), model.chunk, trace.block, longest, own + len(trace) + 1,
                    max_queued_tokens=2**62, waiting_timeout=FOREVER, running_timeout=FOREVER, platform="null")
    scheduler = Scheduler(limits, CacheManager(capacity + 1, trace.block, policy), schedule)
    clients, arrival = _Clients(trace, model.max_running + 1), trace.arrival.tolist()
    now, sent, ended, refused = 0.0, 0, 0, 0
    while ended < len(trace):
        while sent < len(trace) and arrival[sent] <= now:
            scheduler.submit(_request(trace, sent, own, bool(ends[sent])), now)
            sent += 1
        plan = scheduler.plan(now)
        if plan is None:
            over = scheduler.ended()
            if not over and sent < len(trace):
                now = max(now, arrival[sent])
        else:
            now += model.seconds(plan.prompt_tokens, len(plan.decode), int(scheduler.table.length[plan.decode].sum()))
            scheduler.advance(plan)
            clients.got(plan, now)
            over = scheduler.settle(plan, StepResult(_tokens(plan, own))).full
        for output in over:
            ended += output.finish is not None
            refused += output.finish == "error"
        tick(ended)
    more = np.maximum(clients.count - 1, 1)
    tpot = np.where(clients.count > 1, (clients.last - clients.first) / more, np.nan)
    return Served(clients.first - trace.arrival, tpot, np.concatenate([np.zeros(0), *clients.gaps]),
                  now, refused, scheduler.stats.snapshot())


def _request(trace: Trace, i: int, own: int, ends: bool) -> Submit:
    tokens = np.full(max(1, int(trace.inputs[i])), own + i, np.int32)
    blocks = trace.request(i)
    whole = np.repeat(blocks, trace.block)[:len(tokens)]
    tokens[:len(whole)] = whole
    params = SamplingParams(max_tokens=max(1, int(trace.outputs[i])), temperature=0.0, ignore_eos=True)
    return Submit(str(i), pack_ids(tokens), params, arrival=float(trace.arrival[i]), hint=ENDS if ends else None)


def _tokens(plan: Plan, own: int) -> np.ndarray:
    """Each request samples its own token."""
    requests = [*plan.rows.owners.tolist(), *(c.request for c in plan.chunks if c.sample)]
    return np.array([own + int(r.id) for r in requests], np.int32)
