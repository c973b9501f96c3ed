"""`isthmus replay-requests`: send the requests of a dump again."""
from __future__ import annotations

import argparse
import json
import math
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..settings import Resolved
from .backends import own_key
from .banner import base_url
from .posting import Poster, Reply, check_at_once, check_file, count_lines, each, json_lines
from .progress import ProgressLine

ANSWER_S = 3600.0  # without a byte from the server
QUANTILES = (50, 90, 99)
_PATH = re.compile(r"/[\w./~%-]{1,500}", re.ASCII)


class Kept(NamedTuple):
    """A request of a dump: when it is due, in seconds after the first."""

    due: float
    path: str
    body: bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE",
                        help="what `isthmus serve --dump-requests FILE` wrote")
    parser.add_argument("--url", metavar="URL", help="the server; by default the one that --host and --port name")
    parser.add_argument("--speed", type=float, default=1.0, metavar="X",
                        help="2 = twice as fast as they came, 0 = as fast as --concurrency allows [1]")
    parser.add_argument("--concurrency", type=int, default=256, metavar="N", help="most requests at once [256]")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    """0 when every request was answered with success, else 1."""
    path = check_file(arguments.file, "which dump? `isthmus replay-requests FILE` takes what `isthmus serve "
                                      "--dump-requests FILE` wrote")
    if not (arguments.speed >= 0 and math.isfinite(arguments.speed)):
        raise ConfigError(f"--speed {arguments.speed} is out of range, it must be 0 or more")
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit {arguments.limit} is out of range, it must be at least 1")
    at_once, settings = check_at_once(arguments.concurrency), resolved.config.server
    url = arguments.url or base_url(settings.host, settings.port, settings.tls_cert is not None)
    poster = Poster(url, own_key(resolved), ANSWER_S)
    requests = list_requests(path, arguments.limit)
    total = min(count_lines(path), arguments.limit or sys.maxsize)
    replay = Replay(poster, arguments.speed, total)
    with ProgressLine(sys.stderr) as line:
        replay.line = line
        each(requests, replay.send, at_once)
    report = replay.report()
    print(json.dumps(report) if arguments.json else text(report))
    return 0 if not report["failed"] else 1


def list_requests(path: Path, limit: int | None) -> Iterator[Kept]:
    """The requests of a dump, in the order of the file. `ConfigError` names the line of what is none."""
    first = None
    for count, (number, entry) in enumerate(json_lines(path, "requests")):
        if limit is not None and count >= limit:
            return
        known = isinstance(entry, dict) and isinstance(entry.get("body"), dict) and _PATH.fullmatch(
            str(entry.get("path"))) and type(entry.get("time")) in (int, float) and abs(entry["time"]) < 2**53
        if not known or entry.get("method", "POST") != "POST":
            raise ConfigError(f"{path}, line {number}: this is no request with a time, a path and a body, as "
                              "`isthmus serve --dump-requests` writes them")
        first = entry["time"] if first is None else first
        yield Kept(max(0.0, entry["time"] - first), entry["path"], json.dumps(entry["body"]).encode())


class Replay:
    """One run over a dump. line: told of what is done, or None."""

    def __init__(self, poster: Poster, speed: float, total: int):
        self.poster, self.speed, self.total, self.line = poster, speed, total, None
        self.began = time.monotonic()
        self.statuses: Counter[int] = Counter()
        self.firsts: list[float] = []
        self.seconds: list[float] = []
        self.late = 0.0
        self._lock = threading.Lock()

    def send(self, kept: Kept) -> None:
        """Wait until it is due, and send it."""
        late = 0.0
        if self.speed:
            wait = self.began + kept.due / self.speed - time.monotonic()
            late = max(0.0, -wait)
            time.sleep(max(0.0, wait))
        self._took(self.poster.post(kept.path, kept.body, keep=False), late)

    def _took(self, reply: Reply, late: float) -> None:
        with self._lock:
            self.statuses[reply.status] += 1
            if 200 <= reply.status < 300:
                self.firsts.append(reply.first)
                self.seconds.append(reply.seconds)
            self.late = max(self.late, late)
            if self.line is not None:
                self.line("send requests", sum(self.statuses.values()), self.total)

    def report(self) -> dict[str, Any]:
        """What came of it; times in seconds. late: of the request that was sent latest after it was due."""
        sent, spent = sum(self.statuses.values()), time.monotonic() - self.began
        return {"requests": sent, "failed": sent - len(self.seconds), "seconds": round(spent, 3),
                "late": round(self.late, 3),
                "statuses": {str(status or "no answer"): n for status, n in sorted(self.statuses.items())},
                "first_byte": quantiles(self.firsts), "whole_answer": quantiles(self.seconds)}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """The nearest-rank p50, p90 and p99; {} of nothing."""
    ordered = sorted(values)
    return {f"p{q}": round(ordered[max(0, math.ceil(len(ordered) * q / 100) - 1)], 4)
            for q in QUANTILES} if ordered else {}


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{report['requests']} requests in {report['seconds']:g} s, {report['failed']} failed"]
    lines += [f"  {status:<12} {count}" for status, count in report["statuses"].items()]
    for name, label in (("first_byte", "first byte"), ("whole_answer", "whole answer")):
        if report[name]:
            lines.append(f"  {label:<12} " + ", ".join(f"{q} {value:g} s" for q, value in report[name].items()))
    if report["late"] > 1:
        lines.append(f"  up to {report['late']:g} s later than they were due: raise --concurrency, or lower --speed")
    return "\n".join(lines)
