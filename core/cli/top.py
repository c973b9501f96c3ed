"""`isthmus top`: what a running server is doing, on one page that renews itself."""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import ConfigError, RequestError, cut, printable
from ..settings import Resolved
from .backends import RemoteBackend, own_key
from .banner import base_url

ANSWER_S = 10.0    # how long an answer may take
NEWER = 10         # readings that `--once` waits for a number newer than its first
HISTORY = 60       # readings behind a sparkline
WIDTH, LABEL = 24, 12
MAX_LINE = 2000    # characters
BARS, ASCII_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
OWNERS = {"requests": "requests", "cache_used": "cache in use", "cache_idle": "cache idle", "free": "free",
          "quarantine": "quarantine"}


@dataclass(frozen=True)
class Figures:
    """One page. Rates are over the time since the reading before, None where nothing newer came; times in seconds.

    hit_rate: of the last requests. step: mean time of a step by part.
    """

    url: str
    model: str
    platform: str
    uptime: float
    ok: bool
    reason: str
    running: int | None = None
    waiting: int | None = None
    finished: int | None = None
    preemptions: int | None = None
    generated_per_s: float | None = None
    prompt_per_s: float | None = None
    steps_per_s: float | None = None
    hit_rate: float | None = None
    hit_rate_total: float | None = None
    pages: Mapping[str, int] | None = None
    step: Mapping[str, float] | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="the server; by default the one that --host and --port name")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between two readings [1]")
    parser.add_argument("--once", action="store_true", help="one page, after two readings, then leave")
    parser.add_argument("--json", action="store_true", help="print each page as a line of JSON")


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    """Until Ctrl-C, or one page with --once. Raises `RequestError` when the server cannot be reached at first."""
    if not 0.1 <= arguments.interval <= 3600:
        raise ConfigError(f"--interval {arguments.interval:g}: it must be between 0.1 and 3600 seconds")
    settings = resolved.config.server
    url = arguments.url or base_url(settings.host, settings.port, settings.tls_cert is not None)
    source = Source(url, own_key(resolved), arguments.interval)
    try:
        if arguments.once or arguments.json or not sys.stdout.isatty():
            _print(source, arguments.once, arguments.json)
        else:
            _renew(source)
    except KeyboardInterrupt:  # the way to leave
        pass
    return 0


class Source:
    """Readings of a server, `interval` seconds apart."""

    def __init__(self, url: str, key: str | None, interval: float):
        self._server = RemoteBackend(url, None, key, ANSWER_S)
        self.url, self.interval = self._server.root, interval

    def read(self) -> dict[str, Any]:
        """What the server says now."""
        from .server_info import problem  # imports what --help can do without
        try:
            found = self._server.get_json("GET", self._server.root_path + "/server_info")
            wrong = problem(found)
        except RequestError as error:
            if error.status != 404:
                raise
            wrong = "there is none"
        except ValueError as error:  # something else than this API answers
            wrong = str(error)
        if wrong:
            raise ConfigError(f"--url {self.url}: this is no Isthmus server, it has no /server_info with numbers that "
                              f"are known here: {wrong}")
        return found

    def pages(self, patient: bool = False, newer: int = 0) -> Iterator[Figures | str]:
        """A page each `interval`; instead of one, why there is none, as long as a server that was there is away.

        The first comes after two readings, and up to `newer` more while the engine is in a step and has no other
        numbers. patient: wait also for a server that has never answered.
        """
        before: dict[str, Any] | None = None
        while True:
            began = time.monotonic()
            try:
                now = self.read()
            except RequestError as error:
                if before is None and not patient and error.code != "loading":
                    raise
                yield error.message
            else:
                if before is not None and newer and _at(before) == _at(now) and now["stats"]:
                    newer -= 1
                else:
                    if before is not None:
                        newer = 0
                        yield figures(self.url, before, now)
                    before = now
            time.sleep(max(0.0, began + self.interval - time.monotonic()))


def _at(answer: Mapping[str, Any]) -> tuple[float, float]:
    """When the server was started, and when the engine gave these numbers."""
    return answer["started"], answer["time"]


def figures(url: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Figures:
    """What two answers of `/server_info` say. A server that was started anew in between has no rates yet."""
    stats, old, info = now["stats"], before["stats"], now["info"]
    spent = now["time"] - before["time"] if now["started"] == before["started"] else 0.0

    def rate(name: str) -> float | None:
        new = stats.get(name, 0) - old.get(name, 0) if name in stats and name in old else -1
        return new / spent if spent > 0 and new >= 0 else None

    steps = stats.get("steps", 0) - old.get("steps", 0)
    parts, earlier = now["step_seconds"], before["step_seconds"]
    step = {name: (parts[name] - earlier[name]) / steps for name in parts if name in earlier} if steps > 0 else {}
    known = bool(stats)
    return Figures(
        url, now["served_model_name"], str(info.get("platform", "")), time.time() - now["started"],
        now["health"]["ok"], now["health"]["reason"], stats.get("running"), stats.get("waiting"),
        sum(stats["finish_reasons"].values()) if "finish_reasons" in stats else None, stats.get("preemptions"),
        rate("generated_tokens"), rate("prompt_tokens"), rate("steps"), stats.get("hit_rate_window"),
        stats.get("hit_rate_total"), (now["pages"] or None) if known else None, step or None)


def _print(source: Source, once: bool, as_json: bool) -> None:
    """Page after page, for a pipe."""
    for page in source.pages(newer=NEWER if once else 0):
        if isinstance(page, str):
            if once:
                raise RequestError(page, status=502)
            print(json.dumps({"url": source.url, "ok": False, "reason": page}) if as_json else page, flush=True)
            continue
        print(json.dumps(asdict(page)) if as_json else "\n".join(lines(page, plain=not can_draw())), flush=True)
        if once:
            return
        if not as_json:
            print(flush=True)


def _renew(source: Source) -> None:
    """One page in place, in a terminal."""
    from rich.live import Live
    from rich.text import Text
    speeds: deque[float] = deque(maxlen=HISTORY)
    shown: list[str] = [f"{source.url} ..."]
    with Live(Text(shown[0]), auto_refresh=False, screen=True) as live:
        for page in source.pages(patient=True):
            if isinstance(page, str):
                shown = [*shown[:1], "", page, "", "Ctrl-C leaves"]
            else:
                speeds.append(page.generated_per_s or 0.0)
                shown = [*lines(page, speeds, not can_draw()), "", "Ctrl-C leaves"]
            live.update(Text("\n".join(shown), no_wrap=True, overflow="ellipsis"), refresh=True)


def can_draw() -> bool:
    """Whether standard output's encoding has the bars."""
    try:
        BARS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def lines(page: Figures, speeds: deque[float] | None = None, plain: bool = False) -> list[str]:
    """A page for people. speeds: generated tokens/s so far, oldest first, drawn when given.

    What the server calls things steers no terminal, and each is on one line.
    """
    return [cut(printable(line.replace("\n", "?")), MAX_LINE) for line in _lines(page, speeds, plain)]


def _lines(page: Figures, speeds: deque[float] | None, plain: bool) -> list[str]:
    state = "healthy" if page.ok else f"NOT HEALTHY: {page.reason}"
    place = f"{page.model} on {page.platform or 'no platform yet'} at {page.url}"
    found = [f"{place}, up {duration(page.uptime)}, {state}"]

    def row(label: str, text: str) -> None:
        found.append(f"  {label:{LABEL}}{text}")

    if page.running is None:
        row("engine", "it gives no numbers now: it loads, or is gone")
        return found
    row("requests", f"{page.running} running, {_number(page.waiting)} waiting, {_number(page.finished)} finished, "
                    f"{_number(page.preemptions)} preempted")
    row("tokens/s", f"{_rate(page.generated_per_s)} generated, {_rate(page.prompt_per_s)} of prompts"
                    + (f"  {sparkline(speeds, plain)}" if speeds else ""))
    row("hit rate", f"{_share(page.hit_rate)} of the last prompts' tokens, {_share(page.hit_rate_total)} since start")
    for i, (owner, count) in enumerate((page.pages or {}).items()):
        total = sum(page.pages.values())
        row("" if i else "pages", f"{OWNERS.get(owner, owner):14}{_bar(count / total if total else 0, plain)} "
                                  f"{_share(count / total if total else 0)}  {_number(count)}")
    if page.step is None:
        row("step", "none since the last reading" if not page.running else "none has ended since the last reading")
    else:
        whole = sum(page.step.values())
        row("step", f"{whole * 1e3:.2f} ms, {_rate(page.steps_per_s)} a second")
        for part, seconds in page.step.items():
            share = seconds / whole if whole else 0
            row("", f"{part:14}{_bar(share, plain)} {_share(share)}  {seconds * 1e3:.2f} ms")
    return found


def sparkline(values: deque[float], plain: bool = False) -> str:
    """The last values as little bars, up to their largest."""
    bars = ASCII_BARS if plain else BARS
    top = max(values, default=0.0)
    return "".join(bars[round(value / top * (len(bars) - 1))] if top else bars[0] for value in values)


def _bar(share: float, plain: bool) -> str:
    full = round(min(max(share, 0.0), 1.0) * WIDTH)  # numbers of a page need not agree
    return ("#" if plain else "█") * full + ("." if plain else "░") * (WIDTH - full)


def _share(value: float | None) -> str:
    return "    -" if value is None else f"{100 * value:4.1f}%"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def duration(seconds: float) -> str:
    """"3 d 4 h", "4 h 5 min", "5 min 6 s", "6 s"."""
    for large, small, size, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if seconds >= size:
            return f"{seconds // size:.0f} {large} {seconds % size // part:.0f} {small}"
    return f"{max(0, seconds):.0f} s"
