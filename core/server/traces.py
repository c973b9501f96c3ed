"""OpenTelemetry traces: a span for each request that generates, with queue, prefill and decode, made when it has ended.

Source: the semantic conventions for HTTP servers and for generative AI; `gen_ai.latency.*` as vLLM and SGLang have it.
Nothing here holds a prompt or an answer.
"""
from __future__ import annotations

import logging
import time
from typing import Any

from starlette.types import Scope

from ..errors import ConfigError
from ..version import isthmus_version
from .errors import error_code
from .metrics import Clock
from .request_log import GONE

MAX_CHOICES = 16  # of one request whose parts are shown
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/messages": "chat", "/api/chat": "chat"}
MISSING = "--otlp-endpoint needs OpenTelemetry: pip install 'isthmus[otel]'"

log = logging.getLogger(__name__)


class Traces:
    """Sends spans to a collector, beside the server's own work. provider: an SDK's `TracerProvider`."""

    def __init__(self, provider: Any):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        self._provider = provider
        self._tracer = provider.get_tracer("isthmus", isthmus_version())
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, scope: Scope, request_id: str, status: int | None, began: float) -> None:
        """A request has ended that began at `began`, by `time.perf_counter`. One that does not generate has no span."""
        generation = scope.get("state", {}).get("generation")
        if generation is None:
            return
        try:
            self._tell(scope, generation, request_id, status or GONE, began)
        except Exception:  # what watches a request must not harm it
            log.exception("a trace was lost")

    def _tell(self, scope: Scope, generation: Any, request_id: str, status: int, began: float) -> None:
        now = time.perf_counter()
        offset = time.time() - now  # what a span calls time

        def ns(at: float) -> int:
            return int((at + offset) * 1e9)

        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        carrier = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
                   if key in (b"traceparent", b"tracestate")}
        operation = OPERATIONS.get(scope["path"], "text_completion")
        model = generation.server.model
        span = self._tracer.start_span(f"{operation} {model}", context=self._propagator.extract(carrier),
                                       kind=SpanKind.SERVER, start_time=ns(began),
                                       attributes=attributes(scope, generation, operation, request_id, status, began))
        error = scope["state"].get("error")
        if error is not None and status >= 500:
            span.set_status(Status(StatusCode.ERROR, error_code(error) or ""))
        if generation.first is not None:
            span.add_event("gen_ai.first_token", timestamp=ns(generation.first))
        inside = set_span_in_context(span)
        for index, clock in list(enumerate(generation.clocks))[:MAX_CHOICES]:
            if clock is not None:
                for name, start, end in parts(clock, now):
                    part = self._tracer.start_span(name, context=inside, start_time=ns(start),
                                                   attributes={"gen_ai.choice.index": index})
                    part.end(ns(end))
        span.end(ns(now))

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


def parts(clock: Clock, now: float) -> list[tuple[str, float, float]]:
    """Name, start and end of what an engine request has gone through, by `time.perf_counter`."""
    if clock.queued is None:
        return [("queue", clock.start, now)] if clock.first is None else [("decode", clock.first, clock.last)]
    computed = min(clock.start + clock.queued, clock.first if clock.first is not None else now)
    found = [("queue", clock.start, computed), ("prefill", computed, clock.first if clock.first is not None else now)]
    return found + ([("decode", clock.first, clock.last)] if clock.first is not None else [])


def attributes(scope: Scope, generation: Any, operation: str, request_id: str, status: int,
               began: float) -> dict[str, Any]:
    """What a request's span says."""
    usage, params = generation.usage(), generation.prompts[0].params
    model = generation.server.model
    found: dict[str, Any] = {
        "http.request.method": scope["method"], "url.path": scope["path"], "http.response.status_code": status,
        "gen_ai.operation.name": operation, "gen_ai.provider.name": "isthmus", "gen_ai.request.model": model,
        "gen_ai.response.model": model, "gen_ai.response.id": generation.id, "gen_ai.request.id": request_id,
        "gen_ai.request.max_tokens": params.max_tokens, "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p, "gen_ai.request.choice.count": generation.n,
        "gen_ai.response.finish_reasons": sorted({choice.finish or "unfinished" for choice in generation.choices}),
        "gen_ai.usage.input_tokens": usage.prompt_tokens, "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens}
    queued = [clock.queued for clock in generation.clocks if clock is not None and clock.queued is not None]
    if queued:
        found["gen_ai.latency.time_in_queue"] = max(queued)
    if generation.first is not None:
        found["gen_ai.latency.time_to_first_token"] = generation.first - began
    error = scope["state"].get("error")
    if error is not None:
        found["error.type"] = error_code(error) or str(error.status)
    return found


def open_traces(endpoint: str | None) -> Traces | None:
    """Traces that go to an OTLP collector over HTTP; None without an address. `ConfigError` for want of a package.

    Sampling, headers and the service's name are OpenTelemetry's own variables (OTEL_TRACES_SAMPLER and its like).
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(MISSING) from None
    ours = Resource.create({"service.name": "isthmus", "service.version": isthmus_version()})
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=5)))
    return Traces(provider)
