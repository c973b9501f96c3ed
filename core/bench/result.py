"""One form for the results of every part of the suite: runs with figures, and all that is needed to do them again."""
from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ..errors import ConfigError, encodable
from ..files import open_regular
from ..version import isthmus_version

FORM = 1            # of the file
MAX_FILE = 1 << 28  # bytes
PACKAGES = ("numpy", "msgspec", "uvloop", "httptools", "torch", "jax", "mlx", "triton")
HIDDEN = "(hidden)"
_NAME = r"[\w-]*(?:key|token|secret|password)"
_OPTION = re.compile(f"--{_NAME}", re.IGNORECASE)
# What follows the name of a secret as an option or a variable, in a word or in a whole command; who logs in to a URL.
_SECRET = re.compile(rf"""((?<![\w-])(?:--{_NAME}[ =]|{_NAME}=)\s*)("[^"]*"|'[^']*'|\S+)|(://)[^/@\s]+(@)""",
                     re.IGNORECASE)


class Figure(NamedTuple):
    """A number by which runs are compared. better: 1 = more is better, -1 = less is, 0 = it only describes."""

    label: str
    unit: str
    better: int


FIGURES = {
    "output_tokens_per_s": Figure("output", "tokens/s", 1), "prompt_tokens_per_s": Figure("prompts", "tokens/s", 1),
    "requests_per_s": Figure("requests", "/s", 1), "goodput_per_s": Figure("goodput", "requests/s", 1),
    "within_slo": Figure("within the SLO", "share", 1), "hit_rate": Figure("token hit rate", "share", 1),
    "seconds": Figure("seconds in all", "s", -1), "requests": Figure("requests sent", "", 0),
    "failed": Figure("failed", "", -1),
    **{f"{name}_{q}": Figure(f"{words} {q}", "s", -1) for name, words in (
        ("ttft", "first token"), ("tpot", "time per token"), ("itl", "between tokens"), ("e2e", "whole answer"))
       for q in ("mean", "p50", "p99")},
    "tokens_per_s": Figure("tokens", "tokens/s", 1), "ms": Figure("time", "ms", -1), "us": Figure("time", "us", -1),
    "roof_share": Figure("share of the roof", "share", 1), "gb_per_s": Figure("read", "GB/s", 1),
    "tflop_per_s": Figure("computed", "TFLOP/s", 1), "peer_ratio": Figure("times the peer's speed", "x", 1),
    "ready_s": Figure("ready", "s", -1), "first_token_s": Figure("first token after the start", "s", -1),
    "resident_bytes": Figure("resident memory", "bytes", -1), "cpu_s": Figure("processor time", "s", -1),
    "perplexity": Figure("perplexity", "", -1), "perplexity_delta": Figure("above the reference's", "share", -1),
    "agreement": Figure("same best token", "share", 1), "logprob_error": Figure("logprob error", "nats", -1),
}


@dataclass(frozen=True)
class Run:
    """One measurement. label: of its load or case.  figures: by the names of `FIGURES`.  detail: all else."""

    label: str
    figures: Mapping[str, float]
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What a command measured. kind: which command.  subject: what was measured, as it describes itself.
    configuration: workload, load, limits and seed.  made: where, when and by which versions."""

    kind: str
    subject: Mapping[str, Any]
    configuration: Mapping[str, Any]
    runs: Sequence[Run]
    notes: Sequence[str] = ()
    made: Mapping[str, Any] = field(default_factory=lambda: about_here())

    def as_dict(self) -> dict[str, Any]:
        return {"isthmus_bench": FORM, "kind": self.kind, "made": dict(self.made), "subject": dict(self.subject),
                "configuration": dict(self.configuration), "notes": list(self.notes),
                "runs": [{"label": r.label, "figures": dict(r.figures), "detail": dict(r.detail)} for r in self.runs]}


def about_here() -> dict[str, Any]:
    """Versions, machine, command and time."""
    return {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "command": command(sys.argv),
            "isthmus": isthmus_version(), "python": platform.python_version(),
            "packages": {name: found for name in PACKAGES if (found := _version(name))},
            "machine": {"system": platform.platform(), "processor": _processor(), "cores": os.cpu_count(),
                        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
                        "memory": psutil.virtual_memory().total, "load": psutil.getloadavg()[0]}}


def hidden(text: str) -> str:
    """A word or a command for files and terminals, without keys."""
    return _SECRET.sub(lambda found: f"{found[1] or found[3]}{HIDDEN}{found[4] or ''}", text)


def command(words: Sequence[str]) -> list[str]:
    """The command's words, without keys."""
    shown, hide = [], False
    for word in words:
        shown.append(HIDDEN if hide else hidden(word))
        hide = _OPTION.fullmatch(word) is not None
    return ["isthmus", *shown[1:]]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
        return next(line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def write_result(result: Result, path: Path) -> None:
    """Write it as JSON, whole or not at all."""
    part = path.with_name(f".{path.name}.new")
    try:
        part.write_text(encodable(json.dumps(result.as_dict(), indent=1, ensure_ascii=False)) + "\n", "utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_result(path: Path) -> Result:
    """A result that `write_result` wrote. Raises `ConfigError` for anything else."""
    try:
        with open_regular(path) as file:
            data = file.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise ValueError(f"it has more than {MAX_FILE} bytes")
        found = json.loads(data)
        if not isinstance(found, dict) or found.get("isthmus_bench") != FORM:
            raise ValueError(f"it is no result of `isthmus bench` in the form {FORM}")
        runs = [Run(str(r["label"]), {str(k): float(v) for k, v in r["figures"].items()}, dict(r["detail"]))
                for r in found["runs"]]
        return Result(str(found["kind"]), dict(found["subject"]), dict(found["configuration"]), runs,
                      list(found["notes"]), dict(found["made"]))
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        words = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path}: {words}") from None


def shown_figure(name: str, value: float) -> str:
    """A figure with its unit, for people."""
    unit = FIGURES[name].unit if name in FIGURES else ""
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit == "bytes":
        from ..config import shown_size
        return shown_size(value)
    if unit == "s" and abs(value) < 10:
        return f"{1e3 * value:,.1f} ms"
    digits = 0 if abs(value) >= 1000 or not unit and value == int(value) else 2 if abs(value) >= 1 else 4
    return f"{value:,.{digits}f} {unit}".rstrip()
