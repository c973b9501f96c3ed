"""An hour of production on a virtual clock: at its end every figure of the ledger and of the accounting must agree.

    python tests/production.py --minutes 60 --trace conversation_trace.jsonl

Arrivals come from a trace in Mooncake's form (timestamp in ms, input_length, output_length, hash_ids of 512 tokens), or
are made up: conversations of growing length. One request in a hundred is aborted somewhere on its way; eight tenants of
unequal weight ask, two of them at a higher priority. The real engine plans for the null platform; a step takes as long
as a latency model says. What is counted here is counted from the plans and outputs alone, never from the engine's own
counters, which are compared with it. Exits 1 when anything differs.
"""
from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from isthmus.core import startup
from isthmus.core.config import CacheSettings, Config, SchedulerSettings
from isthmus.core.engine import EngineCore
from isthmus.core.errors import Overloaded
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.recording.recorder import Recorder
from isthmus.core.scheduler.stats import WINDOW
from isthmus.core.specs import LayerState, StateSpec
from isthmus.platforms.null.platform import Platform as Null

VOCAB, EOS, BLOCK = 32_000, 2, 512
BEGIN = 1000.0                  # on the clock: an arrival at 0 is none
STEP_S, TOKEN_S = 0.012, 1e-5   # of a step, and of each token in it
ABORTED, TENANTS, ABORT_S = 0.01, 8, 1.5  # share of requests; tenants; mean time until an abort


class Arrival(NamedTuple):
    """A request of the trace: seconds, numbers of its blocks of tokens, lengths in tokens."""

    at: float
    blocks: tuple[int, ...]
    prompt: int
    output: int


def read_trace(path: Path) -> Iterator[Arrival]:
    """Mooncake's JSONL."""
    for line in path.open():
        row = json.loads(line)
        yield Arrival(row["timestamp"] / 1e3, tuple(row["hash_ids"]), row["input_length"], row["output_length"])


def made_up(seconds: float, per_second: float, seed: int) -> Iterator[Arrival]:
    """Conversations: Poisson arrivals, a third of them first turns; a later turn begins with all of an earlier one."""
    rng, at, serial = random.Random(seed), 0.0, 10
    open_ones: deque[tuple[tuple[int, ...], int]] = deque(maxlen=400)
    while (at := at + rng.expovariate(per_second)) < seconds:
        if open_ones and rng.random() < 0.67:
            blocks, length = open_ones[rng.randrange(len(open_ones))]
        else:
            blocks, length = (rng.randrange(5),), BLOCK
        length += int(rng.lognormvariate(6.5, 1.0)) + 1
        length = min(length, 60_000)
        more = math.ceil(length / BLOCK) - len(blocks)
        blocks, serial = blocks + tuple(range(serial, serial + more)), serial + max(0, more)
        open_ones.append((blocks, length))
        yield Arrival(at, blocks, length, min(1500, 1 + int(rng.lognormvariate(5.0, 0.9))))


class Device(Null):
    """The null platform without a thread; a step costs virtual time, and its tokens are a hash of place and row."""

    def __init__(self, clock: list[float]):
        super().__init__({"check": "0", "vocab": str(VOCAB)})
        self.clock = clock

    def compile(self, forward: Any, weights: Any, bucket: Any) -> Any:
        def step(state: Any, batch: Any) -> tuple[Any, Any]:
            self.clock[0] += STEP_S + TOKEN_S * int(batch.starts[-1])
            rows = batch.logit_rows
            places = batch.positions[rows].astype(np.int64) * 7919 + batch.seqs[batch.rows[rows]]
            tokens = np.where(batch.targets < 0, places * 2654435761 % 2**32 % VOCAB, batch.targets).astype(np.int32)
            result = self._result(tokens, batch)
            return SimpleNamespace(collect=lambda: result), state
        return step


class Witness(Recorder):
    """Sees every plan, and keeps its own books of what was admitted and computed."""

    def __init__(self, clock: Any):
        super().__init__(clock)
        self.steps = self.tokens = 0
        self.first: dict[str, tuple[int, float]] = {}  # request -> (where its first chunk began, when)

    def launch(self, plan: Any, batch: Any, cache: Any, run: Any) -> Any:
        self.steps += 1
        self.tokens += int(batch.starts[-1])
        for chunk in plan.chunks:
            self.first.setdefault(chunk.request.id, (int(chunk.start), self._time))
        return super().launch(plan, batch, cache, run)


class Pages:
    """A listener of the tree: which pages are in it."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def stored(self, tokens: bytes, pages: bytes, before: bytes, domain: bytes) -> None:
        new = np.frombuffer(pages, np.int32).tolist()
        assert self.held.isdisjoint(new), f"stored twice: {self.held.intersection(new)}"
        self.held.update(new)

    def removed(self, pages: bytes) -> None:
        gone = np.frombuffer(pages, np.int32).tolist()
        assert self.held.issuperset(gone), f"removed and never stored: {set(gone) - self.held}"
        self.held.difference_update(gone)

    def cleared(self) -> None:
        self.held.clear()


class Production:
    """One run. The counters that begin with `saw` come from arrivals and outputs."""

    def __init__(self, arrivals: Iterator[Arrival], pages: int, seed: int, policy: str):
        self.clock, self.rng = [BEGIN], random.Random(seed)
        self.arrivals = (arrival._replace(at=BEGIN + arrival.at) for arrival in arrivals)
        self.engine = make_engine(self.clock, pages, policy)
        self.witness, self.pages = self.engine.recorder, Pages()
        self.witness.steps = self.witness.tokens = 0
        self.witness.first.clear()
        self.engine.cache.tree.listener = self.pages
        self.submits: dict[str, Submit] = {}   # of requests that have not ended
        self.ends: list[tuple[float, str]] = []  # aborts to come
        self.saw_finish: Counter[str] = Counter()
        self.saw_tokens = self.saw_prompt = self.saw_refused = self.accepted = self.flushes = 0
        self.admitted: dict[str, int] = {}     # admitted request -> its prompt's tokens, in order of admission
        self.saw_cached: dict[str, int] = {}
        self.queue_s = 0.0
        self.window: deque[tuple[int, int]] = deque(maxlen=WINDOW)

    def run(self, seconds: float) -> list[str]:
        """All of it; what does not agree."""
        engine, clock, next_look, seconds = self.engine, self.clock, BEGIN + 60.0, BEGIN + seconds
        arrival = next(self.arrivals, None)
        while True:
            while arrival is not None and arrival.at <= clock[0] and arrival.at < seconds:
                self._submit(arrival)
                arrival = next(self.arrivals, None)
            while self.ends and self.ends[0][0] <= clock[0]:
                engine.abort([heapq.heappop(self.ends)[1]])
            if not engine.has_work:
                if arrival is None or arrival.at >= seconds:
                    break
                clock[0] = max(clock[0], arrival.at)
                continue
            self._take(engine.step())
            if clock[0] > next_look:
                next_look += 60.0
                engine.command("verify")
                if self.rng.random() < 0.1:
                    engine.command("flush_cache")
                    self.flushes += 1
        return self._compare()

    def _submit(self, arrival: Arrival) -> None:
        number = self.accepted + self.saw_refused
        tenant = min(self.rng.randrange(TENANTS), self.rng.randrange(TENANTS))
        prompt = np.concatenate([tokens_of(block) for block in arrival.blocks])[:arrival.prompt]
        stops = tuple(range(10, 70)) if self.rng.random() < 0.2 else ()
        params = SamplingParams(max_tokens=arrival.output, temperature=0.0, stop_token_ids=stops)
        request = Submit(f"r{number}", pack_ids(prompt), params, priority=int(tenant > 5), tenant=f"tenant {tenant}",
                         arrival=arrival.at)
        try:
            self.engine.submit(request)
        except Overloaded:
            self.saw_refused += 1
            return
        self.accepted += 1
        self.submits[request.id] = request
        if self.rng.random() < ABORTED:
            heapq.heappush(self.ends, (self.clock[0] + self.rng.expovariate(1 / ABORT_S), request.id))

    def _take(self, outputs: Any) -> None:
        for id, (start, at) in self.witness.first.items():
            if id not in self.admitted and id in self.submits:
                request = self.submits[id]
                self.admitted[id] = len(request.prompt) // 4
                self.queue_s += max(0.0, at - request.arrival)
                self.window.append((len(request.prompt) // 4, start))
                self.saw_cached[id] = start
        for output in outputs:
            assert output.id in self.submits, f"{output.id} gets output although it is not running"
            self.saw_tokens += len(output.tokens) // 4
            if output.prompt_tokens:
                self.saw_prompt += output.prompt_tokens
                assert output.cached_tokens == self.saw_cached.get(output.id, 0), f"{output}"
            if output.finish is not None:
                self.saw_finish[output.finish] += 1
                del self.submits[output.id]
                if output.id in self.witness.first:
                    del self.witness.first[output.id]

    def _compare(self) -> list[str]:
        stats, pool, tree = self.engine.stats(), self.engine.cache.pool, self.engine.cache.tree
        prompts, cached = sum(self.admitted.values()), sum(self.saw_cached.values())
        pairs = {
            "requests admitted": (len(self.admitted), stats["requests"]),
            "requests that ended": (self.accepted, sum(self.saw_finish.values())),
            "endings by reason": (dict(self.saw_finish), stats["finish_reasons"]),
            "prompt tokens": (prompts, stats["prompt_tokens"]), "cached tokens": (cached, stats["cached_tokens"]),
            "generated tokens": (self.saw_tokens, stats["generated_tokens"]),
            "steps": (self.witness.steps, stats["steps"]),
            "seconds in the queue": (round(self.queue_s, 3), round(stats["queue_seconds"], 3)),
            "hit rate": (round(cached / prompts, 9), round(stats["hit_rate_total"], 9)),
            "hit rate of the window": (round(sum(c for _, c in self.window) / sum(p for p, _ in self.window), 9),
                                       round(stats["hit_rate_window"], 9)),
            "still running or waiting": (0, stats["running"] + stats["waiting"] + len(self.submits)),
            "pages in the tree": (len(self.pages.held), stats["pages_cached"]),
            "pages in the tree, one by one": (sorted(self.pages.held), sorted(np.asarray(tree.pages()).tolist())),
            "pages in all": (pool.capacity, stats["pages_free"] + stats["pages_cached"] + stats["pages_quarantined"]),
            "pages that somebody holds": (0, stats["pages_used"]),
            "ownership violations": (0, stats["ownership_violations"]), "locked pages": (0, tree.protected)}
        self.engine.command("verify")
        self.engine.command("flush_cache")
        pairs["free pages after a flush"] = (pool.capacity, pool.free)
        pairs["pages in the tree after a flush"] = (0, len(self.pages.held))
        return [f"{name}: seen {str(seen)[:200]}, counted {str(counted)[:200]}"
                for name, (seen, counted) in pairs.items() if seen != counted]


def tokens_of(block: int) -> np.ndarray:
    """The tokens of a block of the trace: the same for the same number."""
    return ((np.arange(BLOCK, dtype=np.int64) * 31 + block * 104729 + 3) % (VOCAB - 3) + 3).astype(np.int32)


def make_engine(clock: list[float], pages: int, policy: str) -> EngineCore:
    """An engine for long prompts, without a model's files."""
    device = Device(clock)
    sizes = startup.Sizes(StateSpec((LayerState(1, 1),), "f32", 16, 129), 16, pages, 131_072, 128, 8192)
    model = SimpleNamespace(forward=None, weights=None, report=[], nbytes=0, dtype="f32",
                            config=SimpleNamespace(name="none", model_type="", vocab_size=VOCAB, eos_ids=(EOS,),
                                                       hidden=1))
    loaded = startup.Loaded(device, device.probe(), "named by the test", Path("none"), model, "f32", sizes, True, {},
                            ())
    config = Config(scheduler=SchedulerSettings(schedule_policy=policy, waiting_timeout=120.0, max_queued_requests=400),
                    cache=CacheSettings())
    return EngineCore(config, loaded=loaded, recorder=Witness(lambda: clock[0]))


def production(minutes: float, trace: Path | None = None, pages: int = 30_000, seed: int = 0,
               policy: str = "lpm") -> dict[str, Any]:
    """Run it: what was seen, and `problems`, empty when every figure agrees."""
    arrivals = read_trace(trace) if trace else made_up(60 * minutes, 3.0, seed)
    run, began = Production(arrivals, pages, seed, policy), time.process_time()
    problems = run.run(60 * minutes)
    stats = run.engine.stats()
    run.engine.close()
    return {"minutes": round((run.clock[0] - BEGIN) / 60, 1), "requests": run.accepted, "refused": run.saw_refused,
            "endings": dict(run.saw_finish), "steps": run.witness.steps, "tokens_computed": run.witness.tokens,
            "hit_rate": round(stats["hit_rate_total"], 4), "preemptions": stats["preemptions"],
            "evicted_pages": stats["evicted_pages"], "flushes": run.flushes,
            "processor_seconds": round(time.process_time() - began), "problems": problems}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--pages", type=int, default=30_000)
    parser.add_argument("--policy", default="lpm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = production(args.minutes, args.trace, args.pages, args.seed, args.policy)
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result))
    sys.exit(bool(result["problems"]))


if __name__ == "__main__":
    main()
