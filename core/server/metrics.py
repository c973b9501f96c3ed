"""Prometheus metrics: the engine's counters and the latencies that the server sees, under our names and others'."""
from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from .figures import pages_by_owner, step_seconds
from .metric_names import ENGINE, FAMILIES, MEASURED, Family, derived

RATE_S = 2.0  # a rate is over at least so long, however often somebody asks


class Histogram:
    """Counts per bucket of observed values; the last bucket is everything above the bounds."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it) as Prometheus wants them."""
        total, buckets = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        return buckets


class Clock:
    """Measures one engine request. start, first, last: by `time.perf_counter`, first None until a token came; queued:
    seconds until it was computed, None until that is known."""

    def __init__(self, metrics: Metrics, prompt_tokens: int, max_tokens: int = 0):
        self.metrics, self.prompt_tokens, self.max_tokens = metrics, prompt_tokens, max_tokens
        self.start = self.last = time.perf_counter()
        self.first: float | None = None
        self.queued: float | None = None
        self.tokens = 0

    def output(self, tokens: int, queued: float | None = None) -> None:
        """An output arrived; the request has `tokens` by now. queued: on the first one."""
        if self.queued is None:
            self.queued = queued
        new = tokens - self.tokens
        if new <= 0:
            return
        now = time.perf_counter()
        if self.first is None:
            self.first = now
            self.metrics.measured["ttft"].observe(now - self.start)
        else:
            self.metrics.measured["itl"].observe((now - self.last) / new, new)
        self.tokens, self.last = tokens, now

    def end(self, finish: str) -> None:
        """The request ended: "stop", "length", "abort" or "error"."""
        self.metrics.finished[finish] += 1
        if finish not in ("stop", "length"):
            return
        now = time.perf_counter()
        found = {"e2e": now - self.start, "prompt": self.prompt_tokens, "output": self.tokens,
                 "max_tokens": self.max_tokens}
        if self.queued is not None:
            found |= {"queue": self.queued, "inference": max(0.0, now - self.start - self.queued)}
            if self.first is not None:
                found["prefill"] = max(0.0, self.first - self.start - self.queued)
        if self.first is not None:
            found["decode"] = self.last - self.first
            if self.tokens > 1:
                found["tpot"] = found["decode"] / (self.tokens - 1)
        for key, value in found.items():
            self.metrics.measured[key].observe(value)


class Metrics:
    """One app's numbers and the registry that exports them. families: words of `FAMILIES`."""

    def __init__(self, families: Sequence[str] = ("isthmus", "vllm")) -> None:
        self.families = [FAMILIES[name] for name in families]
        self.measured = {key: Histogram(bounds) for key, bounds, *_ in MEASURED}
        self.finished: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self._model, self._info, self._stats = "", {}, {}
        self._rate: tuple[float, float, float] = (0.0, 0.0, 0.0)  # when, tokens then, and a second since the one before
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def clock(self, prompt_tokens: int, max_tokens: int = 0) -> Clock:
        """Start to measure one engine request."""
        return Clock(self, prompt_tokens, max_tokens)

    def call(self, answers: int) -> None:
        """Count one call that generates so many answers to each of its prompts."""
        self.measured["n"].observe(answers)

    def count_status(self, status: int) -> None:
        """Count one HTTP answer."""
        self.statuses[status] += 1

    def export(self, model: str, info: dict[str, Any], stats: dict[str, Any]) -> bytes:
        """The text format. Numbers that the engine does not give are left out."""
        self._model, self._info = model, info
        self._stats = {**stats, **derived(stats)}
        if "generated_tokens" in stats:
            self._stats["generated_per_s"] = self._per_second(stats["generated_tokens"])
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        for family in self.families:
            yield from self._engine(family)
            yield from self._latencies(family)
            yield from getattr(self, f"_of_{family.prefix[:-1]}")(family)

    def _per_second(self, tokens: float) -> float:
        now, (then, before, rate) = time.monotonic(), self._rate
        if then and now - then < RATE_S and tokens >= before:
            return rate
        rate = (tokens - before) / (now - then) if then and tokens >= before else 0.0
        self._rate = now, tokens, rate
        return rate

    def _engine(self, family: Family) -> Iterator[Metric]:
        for key, kind, *names, help in ENGINE:
            value, name = self._stats.get(key), names[family.column]
            if name is not None and isinstance(value, (int, float)):
                yield self._made(GaugeMetricFamily if kind == "gauge" else CounterMetricFamily, family, name, help,
                                 {(): value})

    def _latencies(self, family: Family) -> Iterator[Metric]:
        labels = self._labels(family)
        for key, _, *names, help in MEASURED:
            if names[family.column] is not None:
                histogram = self.measured[key]
                made = HistogramMetricFamily(family.prefix + names[family.column], help, labels=list(labels))
                made.add_metric(list(labels.values()), histogram.cumulative(), histogram.sum)
                yield made

    def _of_isthmus(self, family: Family) -> Iterator[Metric]:
        yield self._counter(family, "requests_finished", "Engine requests by how they ended", "finish", self.finished)
        yield self._counter(family, "http_responses", "HTTP answers by status", "status", self.statuses)
        if seconds := step_seconds(self._stats):
            yield self._counter(family, "step_seconds", "Time of steps: planning and building the batch, the device, "
                                "taking in the result", "part", seconds)
        yield from self._places(family, "accepted_draft_tokens_at", "place")
        if pages := pages_by_owner(self._stats):
            yield self._made(GaugeMetricFamily, family, "kv_pages_owned", "Pages of K and V by who holds them; all "
                             "together are the pool", {(owner,): count for owner, count in pages.items()}, ("owner",))

    def _of_vllm(self, family: Family) -> Iterator[Metric]:
        yield self._counter(family, "request_success", "Requests that ended by themselves", "finished_reason",
                            {key: self.finished[key] for key in ("stop", "length", "abort")})
        if isinstance(waiting := self._stats.get("waiting"), int):
            deferred = self._stats.get("grammars_compiling", 0)
            yield self._made(GaugeMetricFamily, family, "num_requests_waiting_by_reason", "Requests that wait for "
                             "capacity, and for their grammar", {("capacity",): waiting, ("deferred",): deferred},
                             ("reason",))
        if isinstance(steps := self._stats.get("steps"), int):
            # Only sums are known: one bucket.
            computed = sum(self._stats.get(key, 0) * sign for key, sign in (
                ("prompt_tokens", 1), ("cached_tokens", -1), ("reprefill_tokens", 1), ("reprefill_cached_tokens", -1),
                ("generated_tokens", 1)))
            labels = self._labels(family)
            made = HistogramMetricFamily(family.prefix + "iteration_tokens_total", "Tokens of a step, in one bucket",
                                         labels=list(labels))
            made.add_metric(list(labels.values()), [("+Inf", steps)], computed)
            yield made
        yield from self._places(family, "spec_decode_num_accepted_tokens_per_pos", "position")
        asleep = {("awake",): 1, ("weights_offloaded",): 0, ("discard_all",): 0}
        yield self._made(GaugeMetricFamily, family, "engine_sleep_state", "Whether the engine sleeps; it never does",
                         asleep, ("sleep_state",))
        if slots := self._stats.get("lora_slots"):  # routers send requests where their adapter is
            running, waiting = (",".join(self._stats.get(f"lora_{word}", ())) for word in ("running", "waiting"))
            yield self._made(GaugeMetricFamily, family, "lora_requests_info", "Since 1970, with the adapters that "
                             "requests use and wait for as labels", {(str(slots), running, waiting): time.time()},
                             ("max_lora", "running_lora_adapters", "waiting_lora_adapters"))
        yield from self._cache_config(family, "block_size", "num_gpu_blocks")

    def _of_sglang(self, family: Family) -> Iterator[Metric]:
        yield self._made(CounterMetricFamily, family, "num_requests", "Engine requests that have ended",
                         {(): sum(self.finished.values())})
        yield self._made(CounterMetricFamily, family, "num_aborted_requests", "Engine requests that were aborted",
                         {(): self.finished["abort"]})
        if isinstance(cached := self._stats.get("cached_tokens"), int):
            yield self._counter(family, "cached_tokens", "Prompt tokens found in the prefix cache", "cache_source",
                                {"device": cached})
        yield from self._cache_config(family, "page_size", "num_pages")

    def _places(self, family: Family, name: str, label: str) -> Iterator[Metric]:
        """Accepted tokens by their place in the draft, of engines that draft."""
        if places := self._stats.get("accepted_at"):
            yield self._counter(family, name, "Accepted draft tokens by place in the draft, 0 = the first", label,
                                dict(enumerate(places)))

    def _labels(self, family: Family) -> dict[str, str]:
        return {"model_name": self._model, **family.labels}

    def _counter(self, family: Family, name: str, help: str, label: str, values: Mapping[Any, float]) -> Metric:
        return self._made(CounterMetricFamily, family, name, help,
                          {(str(key),): value for key, value in sorted(values.items())}, (label,))

    def _made(self, kind: type, family: Family, name: str, help: str, values: Mapping[tuple[str, ...], float],
              more: tuple[str, ...] = ()) -> Metric:
        """A metric; values: by what the labels `more` say."""
        labels = self._labels(family)
        made = kind(family.prefix + name, help, labels=[*labels, *more])
        for words, value in values.items():
            made.add_metric([*labels.values(), *words], value)
        return made

    def _cache_config(self, family: Family, size: str, pages: str) -> Iterator[Metric]:
        if self._info:
            facts = {size: str(self._info.get("page_size", "")), pages: str(self._info.get("pages", ""))}
            yield self._made(GaugeMetricFamily, family, "cache_config_info", "Page size and number of pages, as labels",
                             {tuple(facts.values()): 1}, tuple(facts))
