"""What became of requests: one `Outcome` each, and the one `Recorder` that makes figures of them."""
from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple, TextIO

from ..errors import ConfigError, shown
from .percentiles import Sketch, Timeline, summary

EXAMPLES = 3         # messages that are kept of each kind of error
LIMITS = ("ttft", "tpot", "itl", "e2e")
UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0}
Slo = Mapping[str, float]


class Outcome(NamedTuple):
    """One request as its client saw it; times in seconds on the run's clock.

    due: when it should have been sent; in a closed loop that is when it was.  first, last: its tokens.  gaps: between
    two events that brought tokens, the second of which came at `events`.  counts: tokens that each event brought.
    prompt, cached, completion: tokens, as the server counts them; cached is None where it does not tell.
    error: the kind of what went wrong, "" for nothing, and `message` what was said.  text: of the answer, if kept.
    """

    due: float
    sent: float
    ended: float
    events: list[float]
    counts: list[int]
    prompt: int = 0
    cached: int | None = None
    completion: int = 0
    error: str = ""
    message: str = ""
    text: str = ""

    @property
    def ttft(self) -> float:
        """Time to first token, from when it was due."""
        return self.events[0] - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None with one token."""
        return (self.events[-1] - self.events[0]) / (self.completion - 1) if self.completion > 1 else None

    @property
    def e2e(self) -> float:
        return self.ended - self.due

    @property
    def longest_gap(self) -> float:
        return max((b - a for a, b in zip(self.events, self.events[1:], strict=False)), default=0.0)

    def within(self, slo: Slo) -> bool:
        """Was it answered within all limits? itl is held against the longest gap."""
        found = {"ttft": self.ttft, "tpot": self.tpot or 0.0, "itl": self.longest_gap, "e2e": self.e2e} \
            if not self.error else {}
        return bool(found) and all(found[name] <= limit for name, limit in slo.items())


def read_slo(text: str) -> dict[str, float]:
    """"ttft=200ms,itl=50ms" -> seconds by name. Raises `ConfigError` for anything else."""
    found: dict[str, float] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition("=")
        number = value.strip().lower().rstrip("ms")
        unit = value.strip().lower()[len(number):]
        try:
            amount = float(number) * UNITS[unit]
        except (ValueError, KeyError):
            amount = -1.0
        if name.strip() not in LIMITS or not 0 < amount < 1e6:
            raise ConfigError(f"--slo {shown(part)}: limits are {', '.join(LIMITS)}, each with a time, such as "
                              "ttft=200ms,itl=50ms")
        found[name.strip()] = amount
    return found


class Recorder:
    """Takes outcomes as they come; its memory grows by a few numbers a request, whatever the length of the answers.

    rows: a file for a line of JSON for each request, or None.  start: of the run, on the clock of outcomes.
    """

    def __init__(self, slo: Slo, start: float = 0.0, rows: TextIO | None = None):
        self.slo, self.start, self.rows = slo, start, rows
        self.times = {name: array("d") for name in ("ttft", "tpot", "e2e", "late")}
        self.itl = Sketch()
        self.tokens, self.done = Timeline(), Timeline()
        self.sent = self.good = self.prompt = self.completion = 0
        self.cached: int | None = None
        self.errors: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}
        self.last = start

    def add(self, outcome: Outcome) -> None:
        self.sent += 1
        self.last = max(self.last, outcome.ended)
        self.times["late"].append(outcome.sent - outcome.due)
        self.good += outcome.within(self.slo)
        if self.rows is not None:
            self.rows.write(json.dumps(self._row(outcome)) + "\n")
        if outcome.error:
            self.errors[outcome.error] += 1
            kept = self.examples.setdefault(outcome.error, [])
            if len(kept) < EXAMPLES and outcome.message not in kept:
                kept.append(outcome.message)
            return
        self.times["ttft"].append(outcome.ttft)
        self.times["e2e"].append(outcome.e2e)
        if (tpot := outcome.tpot) is not None:
            self.times["tpot"].append(tpot)
        for a, b in zip(outcome.events, outcome.events[1:], strict=False):
            self.itl.add(b - a)
        for when, count in zip(outcome.events, outcome.counts, strict=True):
            self.tokens.add(when - self.start, count)
        self.done.add(outcome.ended - self.start, 1)
        self.prompt += outcome.prompt
        self.completion += outcome.completion
        if outcome.cached is not None:
            self.cached = (self.cached or 0) + outcome.cached

    def _row(self, outcome: Outcome) -> dict[str, Any]:
        row = {"due": outcome.due - self.start, "sent": outcome.sent - self.start, "ended": outcome.ended - self.start,
               "prompt": outcome.prompt, "cached": outcome.cached, "completion": outcome.completion}
        if outcome.error:
            return row | {"error": outcome.error, "message": outcome.message}
        return row | {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2e": outcome.e2e,
                      "longest_gap": outcome.longest_gap, "within_slo": outcome.within(self.slo)}

    def figures(self) -> dict[str, float]:
        """The numbers by which runs are compared; those that were not seen are left out."""
        seconds = max(self.last - self.start, 1e-9)
        answered = self.sent - self.errors.total()
        found = {"seconds": seconds, "requests": self.sent, "failed": self.errors.total(),
                 "output_tokens_per_s": self.completion / seconds, "prompt_tokens_per_s": self.prompt / seconds,
                 "requests_per_s": answered / seconds}
        if self.slo:
            found |= {"goodput_per_s": self.good / seconds, "within_slo": self.good / max(1, self.sent)}
        if self.cached is not None and self.prompt:
            found["hit_rate"] = self.cached / self.prompt
        for name, told in self.percentiles().items():
            if name != "late":
                found |= {f"{name}_{q}": told[q] for q in ("mean", "p50", "p99") if q in told}
        return found

    def percentiles(self) -> dict[str, dict[str, float]]:
        """Of each time by name, in seconds."""
        return {**{name: summary(values) for name, values in self.times.items()}, "itl": self.itl.summary()}

    def detail(self) -> dict[str, Any]:
        """All else that is told of a run."""
        seconds = max(self.last - self.start, 1e-9)
        return {"percentiles": self.percentiles(), "prompt_tokens": self.prompt, "completion_tokens": self.completion,
                "errors": dict(self.errors), "error_examples": self.examples,
                "timeline": {"span": self.tokens.span, "output_tokens_per_s": self.tokens.rates(seconds)},
                "completions": {"span": self.done.span, "requests_per_s": self.done.rates(seconds)}}
