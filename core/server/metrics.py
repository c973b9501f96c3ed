"""Prometheus metrics: the engine's counters and the latencies that the server sees, under our names and vLLM's.

Source of the `vllm:` names: the metrics that Gateway API inference routers, autoscalers and dashboards read.
"""
from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from .figures import pages_by_owner, step_seconds

SECONDS = (.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

# Names of the same number: key in the engine's stats, kind, our name, vLLM's name, help.
ENGINE = (
    ("running", "gauge", "requests_running", "num_requests_running", "Requests being computed"),
    ("waiting", "gauge", "requests_waiting", "num_requests_waiting", "Requests in the queue"),
    ("pages_total", "gauge", "kv_pages", None, "Pages of K and V in the pool"),
    ("pages_free", "gauge", "kv_pages_free", None, "Pages that hold nothing"),
    ("pages_cached", "gauge", "kv_pages_cached", None, "Pages in the prefix cache, in use or not"),
    ("pages_used", "gauge", "kv_pages_used", None, "Pages that requests hold"),
    ("pages_quarantined", "gauge", "kv_pages_quarantined", None, "Pages taken out of use after an ownership error"),
    ("kv_usage", "gauge", "kv_cache_usage_ratio", "kv_cache_usage_perc", "Share of pages held by requests, 0 to 1"),
    ("hit_rate_window", "gauge", "prefix_cache_hit_ratio_window", None,
     "Cached share of the prompt tokens of the last first attempts, 0 to 1"),
    ("requests", "counter", "requests_admitted", None, "Requests that started to be computed"),
    ("prompt_tokens", "counter", "prompt_tokens", "prompt_tokens", "Prompt tokens of admitted requests"),
    ("generated_tokens", "counter", "generated_tokens", "generation_tokens", "Tokens of outputs"),
    ("forced_tokens", "counter", "forced_tokens", None, "Of those, known without being sampled: a grammar forced them"),
    ("grammars_compiled", "counter", "grammars_compiled", None, "Grammars of structured output compiled"),
    ("grammar_compile_seconds", "counter", "grammar_compile_seconds", None, "Time that took, beside the engine's loop"),
    ("grammars_compiling", "gauge", "grammars_compiling", None, "Requests whose grammar is being compiled"),
    ("prompt_tokens", "counter", "prefix_cache_queries", "prefix_cache_queries",
     "Prompt tokens looked up in the prefix cache, first attempts"),
    ("cached_tokens", "counter", "prefix_cache_hits", "prefix_cache_hits",
     "Prompt tokens found in the prefix cache, first attempts"),
    ("cached_tokens", "counter", None, "prompt_tokens_cached", "Prompt tokens found in the prefix cache"),
    ("reprefill_tokens", "counter", "reprefill_tokens", None, "Tokens that preempted requests looked up again"),
    ("reprefill_cached_tokens", "counter", "reprefill_cached_tokens", None,
     "Tokens that preempted requests found in the cache again"),
    ("preemptions", "counter", "preemptions", "num_preemptions", "Requests that lost their pages to others"),
    ("evicted_pages", "counter", "kv_pages_evicted", None, "Cached pages given up for others"),
    ("pages_given_back", "counter", "kv_pages_given_back", None, "Pages of K and V given back for want of memory"),
    ("ownership_violations", "counter", "kv_ownership_violations", None, "Errors in the ownership of pages"),
    ("steps", "counter", "steps", None, "Forward passes"),
    ("pins", "gauge", "kv_pins", None, "Sessions whose cached pages are pinned"),
    ("pages_pinned", "gauge", "kv_pages_pinned", None, "Pages that pins keep"),
    ("kv_event_batches", "counter", "kv_event_batches", None, "Batches of cache events published"),
    ("step_age", "gauge", "step_age_seconds", None, "Since a step finished; 0 while the engine has nothing to do"),
    ("stats_age", "gauge", "engine_stats_age_seconds", None,
     "Since the engine gave its numbers; it gives new ones between two steps"),
    ("restarts", "counter", "engine_restarts", None, "Times that an engine that had died was started anew"),
)
# What the server measures: key, buckets, our name, vLLM's name, help.
MEASURED = (
    ("e2e", SECONDS, "e2e_request_latency_seconds", "e2e_request_latency_seconds", "From arrival to the last token"),
    ("ttft", SECONDS, "time_to_first_token_seconds", "time_to_first_token_seconds", "From arrival to the first token"),
    ("itl", SECONDS, "inter_token_latency_seconds", "inter_token_latency_seconds", "Between two tokens of a request"),
    ("prompt", TOKENS, "request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a request"),
    ("output", TOKENS, "request_generation_tokens", "request_generation_tokens", "Tokens generated for a request"),
)


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
    """Measures one engine request."""

    def __init__(self, metrics: Metrics, prompt_tokens: int):
        self.metrics, self.prompt_tokens = metrics, prompt_tokens
        self.start = self.last = time.perf_counter()
        self.tokens = 0

    def output(self, tokens: int) -> None:
        """An output arrived; the request has `tokens` by now."""
        new = tokens - self.tokens
        if new <= 0:
            return
        now = time.perf_counter()
        if self.tokens == 0:
            self.metrics.measured["ttft"].observe(now - self.start)
        else:
            self.metrics.measured["itl"].observe((now - self.last) / new, new)
        self.tokens, self.last = tokens, now

    def end(self, finish: str) -> None:
        """The request ended: "stop", "length", "abort" or "error"."""
        self.metrics.finished[finish] += 1
        if finish in ("stop", "length"):
            self.metrics.measured["e2e"].observe(time.perf_counter() - self.start)
            self.metrics.measured["prompt"].observe(self.prompt_tokens)
            self.metrics.measured["output"].observe(self.tokens)


class Metrics:
    """One app's numbers and the registry that exports them."""

    def __init__(self) -> None:
        self.measured = {key: Histogram(bounds) for key, bounds, *_ in MEASURED}
        self.finished: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self._model, self._info, self._stats = "", {}, {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def clock(self, prompt_tokens: int) -> Clock:
        """Start to measure one engine request."""
        return Clock(self, prompt_tokens)

    def count_status(self, status: int) -> None:
        """Count one HTTP answer."""
        self.statuses[status] += 1

    def export(self, model: str, info: dict[str, Any], stats: dict[str, Any]) -> bytes:
        """The text format. Numbers that the engine does not give are left out."""
        self._model, self._info, self._stats = model, info, dict(stats)
        if stats.get("pages_total") and "pages_used" in stats:
            self._stats["kv_usage"] = stats["pages_used"] / stats["pages_total"]
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        for prefix, column in (("isthmus_", 0), ("vllm:", 1)):
            yield from self._engine(prefix, column)
            yield from self._latencies(prefix, column)
        yield self._counter("isthmus_requests_finished", "Engine requests by how they ended", "finish", self.finished)
        yield self._counter("vllm:request_success", "Requests that ended by themselves", "finished_reason",
                            {key: self.finished[key] for key in ("stop", "length", "abort")})
        yield self._counter("isthmus_http_responses", "HTTP answers by status", "status", self.statuses)
        if seconds := step_seconds(self._stats):
            yield self._counter("isthmus_step_seconds", "Time of steps: planning and building the batch, the device, "
                                "taking in the result", "part", seconds)
        if pages := pages_by_owner(self._stats):
            yield self._gauge("isthmus_kv_pages_owned", "Pages of K and V by who holds them; all together are the pool",
                              "owner", pages)
        if self._info:
            yield self._cache_config()

    def _labels(self, prefix: str) -> dict[str, str]:
        return {"model_name": self._model, **({"engine": "0"} if prefix == "vllm:" else {})}

    def _engine(self, prefix: str, column: int) -> Iterator[Metric]:
        labels = self._labels(prefix)
        for key, kind, *names, help in ENGINE:
            value = self._stats.get(key)
            if names[column] is not None and isinstance(value, (int, float)):
                family = (GaugeMetricFamily if kind == "gauge" else CounterMetricFamily)(
                    prefix + names[column], help, labels=list(labels))
                family.add_metric(list(labels.values()), value)
                yield family

    def _latencies(self, prefix: str, column: int) -> Iterator[Metric]:
        labels = self._labels(prefix)
        for key, _, *names, help in MEASURED:
            histogram = self.measured[key]
            family = HistogramMetricFamily(prefix + names[column], help, labels=list(labels))
            family.add_metric(list(labels.values()), histogram.cumulative(), histogram.sum)
            yield family
        if isinstance(self._stats.get("queue_seconds"), (int, float)):  # the engine sums the times up: one bucket
            family = HistogramMetricFamily(prefix + "request_queue_time_seconds", "From arrival to the first attempt",
                                           labels=list(labels))
            family.add_metric(list(labels.values()), [("+Inf", self._stats.get("requests", 0))],
                              self._stats["queue_seconds"])
            yield family

    def _counter(self, name: str, help: str, label: str, values: Mapping[Any, float]) -> Metric:
        return self._by_label(CounterMetricFamily, name, help, label, values)

    def _gauge(self, name: str, help: str, label: str, values: Mapping[Any, float]) -> Metric:
        return self._by_label(GaugeMetricFamily, name, help, label, values)

    def _by_label(self, kind: type, name: str, help: str, label: str, values: Mapping[Any, float]) -> Metric:
        labels = self._labels("vllm:" if name.startswith("vllm:") else "")
        family = kind(name, help, labels=[*labels, label])
        for key, value in sorted(values.items()):
            family.add_metric([*labels.values(), str(key)], value)
        return family

    def _cache_config(self) -> Metric:
        labels = self._labels("vllm:")
        facts = {"block_size": self._info.get("page_size", ""), "num_gpu_blocks": self._info.get("pages", "")}
        family = GaugeMetricFamily("vllm:cache_config_info", "Page size and number of pages, as labels",
                                   labels=[*labels, *facts])
        family.add_metric([*labels.values(), *map(str, facts.values())], 1)
        return family
