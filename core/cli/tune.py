"""`isthmus tune`: settings that serve a workload best, found by measured runs, as a file for `isthmus serve`."""
from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, IsthmusError, said
from ..files import check_written
from ..settings import Resolved, check, list_settings, value_of
from ..suggest import suggest
from .backends import own_key
from .bench_load import add_load_arguments, add_workload_arguments, check_workload, make_loads, make_workload
from .bench_server import find_server
from .parser import add_model_argument
from .progress import ProgressLine

if TYPE_CHECKING:
    from ..bench.tune import Knob, Settings, Trial

MAX_MINUTES = 7 * 24 * 60
DEFAULTS = {"chunked_prefill_size": (64, 128, 256, 512, 1024, 2048, 4096),
            "max_running_requests": (4, 8, 16, 32, 64, 128, 256, 512), "itl_target": (0.0, 20.0, 50.0, 100.0, 200.0),
            "overlap": (False, True), "schedule_policy": ("fcfs", "lpm"),
            "speculative": ((), *(("ngram", f"tokens={n}") for n in (2, 4, 8)))}
OFF = "off"  # of a setting that is a list
PRIVATE = ("api_key", "admin_api_key", "host", "port", "tls_cert", "tls_key")
# What a server leaves in files and sends to addresses: those of the one that the settings are for, not of trials.
KEPT = ("response_store", "dump_requests", "record", "kv_events", "kv_events_replay", "otlp_endpoint")
OPTION = "platform_option:"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    group = parser.add_argument_group("the search")
    group.add_argument("--minutes", type=float, default=10.0, metavar="X", help="for all of it [10]")
    group.add_argument("--knob", action="append", default=[], metavar="NAME=V,V,...",
                       help="a setting, or platform_option:NAME, and the values to try in order, with ; between them "
                       f"where they have commas, {OFF} for an empty list; may be repeated; without any "
                       f"{', '.join(DEFAULTS)} and the platform's threads")
    group.add_argument("--goal", default="", metavar="FIGURE",
                       help="to be made as good as can be: output_tokens_per_s, or with --slo goodput_per_s")
    group.add_argument("--gain", type=float, default=0.03, metavar="SHARE",
                       help="by which a value must be better to be taken [0.03]")
    group.add_argument("-o", "--output", type=Path, default=Path("tuned.yaml"), metavar="FILE",
                       help="for `isthmus serve --config FILE` [tuned.yaml]")
    group.add_argument("--state", type=Path, metavar="FILE",
                       help="log of all measurements; the search goes on from it [the output's name with .trials]")
    add_workload_arguments(parser)
    add_load_arguments(parser, several=False)


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    """0 with the file written, also when the time was over before the search was done."""
    from ..bench.recorder import read_slo
    from ..bench.result import FIGURES
    from ..bench.tune import Log, Search
    check_workload(arguments)
    (load, *more), slo = make_loads(arguments), read_slo(arguments.slo)
    if more:
        raise ConfigError("one load is tuned for: give one --concurrency or one --rate")
    if not 0 < arguments.minutes <= MAX_MINUTES:
        raise ConfigError(f"--minutes {arguments.minutes:g}: it must be above 0 and at most {MAX_MINUTES}")
    if not 0 <= arguments.gain < 1:
        raise ConfigError(f"--gain {arguments.gain:g}: it must be from 0 to below 1")
    goal = arguments.goal or ("goodput_per_s" if slo else "output_tokens_per_s")
    if goal not in FIGURES or not FIGURES[goal].better:
        raise ConfigError(f"--goal {goal}: no figure that can be better{suggest(goal, FIGURES)}")
    named = [read_knob(text) for text in arguments.knob]
    state = arguments.state or arguments.output.with_suffix(".trials")
    check_written(arguments.output, "--output")
    check_written(state, "--state")
    if state.resolve() == arguments.output.resolve():
        raise ConfigError(f"--state and --output are both {state}: name two files")
    base = _given(resolved, OPTION)
    trials = Trials(arguments, base, load, slo, goal, own_key(resolved))
    log = Log(state, {"base": base, "goal": goal, "slo": slo, "load": load.facts, "knobs": arguments.knob, "workload": {
        name: str(getattr(arguments, name)) for name in (*arguments.defaults, "spread", "think", "trace", "prompts",
                                                        "speed", "longest", "text")}})
    ends = time.monotonic() + 60 * arguments.minutes
    try:
        with ProgressLine(sys.stderr) as line:
            trials.line = line
            search = Search(log, trials.measure, lambda: ends - time.monotonic(), arguments.gain, tell)
            start = _start(resolved, named)
            search.run(lambda platform: named or default_knobs(platform, start), start)
    finally:
        log.close()
    _write(arguments.output, search, base, goal)
    return 0


def read_knob(text: str) -> Knob:
    """"chunked_prefill_size=128,256" -> its values in the setting's own type. Raises `ConfigError`."""
    from ..bench.tune import Knob
    name, sign, rest = text.partition("=")
    name, known = name.strip().removeprefix("--").replace("-", "_"), list_settings()
    values = [part.strip() for part in rest.split(";" if ";" in rest else ",") if part.strip()]
    if not sign or len(values) < 2:
        raise ConfigError(f"--knob {text}: a setting and at least two values, such as chunked_prefill_size=128,512")
    if name.startswith(OPTION):
        return Knob(name, tuple(values))
    if name in PRIVATE:
        raise ConfigError(f"--knob {name}: no setting that is tuned: keys, addresses and certificates stay as they are")
    if name not in known:
        raise ConfigError(f"--knob {name}: no setting that can be tuned has this name{suggest(name, known)}; "
                          "`isthmus serve --help` lists the settings")
    empty = known[name].type is tuple
    return Knob(name, tuple(() if empty and value == OFF else check(known[name], value, f"--knob {name}")
                            for value in values))


def default_knobs(platform: str, start: dict[str, Any]) -> list[Knob]:
    """What is tried without --knob: values around those where the search begins."""
    from ..bench.tune import Knob
    from ..manifests import Claim, read_claims
    found = []
    for name, values in DEFAULTS.items():
        here = start.setdefault(name, None)
        order = values if here in values or isinstance(here, str | tuple) else tuple(sorted({*values, here}))
        found.append(Knob(name, order if here in order else (here, *order)))
    claim = read_claims().get(platform)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if isinstance(claim, Claim) and "threads" in claim.options and cores > 1:
        name = f"{OPTION}threads"
        threads = sorted({1, 2, 4, 8, 16, 32, 64, cores // 2, cores} - {0})
        values = tuple(str(n) for n in threads if n <= cores)
        start.setdefault(name, values[-1])
        found.append(Knob(name, values if start[name] in values else (*values, start[name])))
    return found


def _given(resolved: Resolved, option: str) -> dict[str, Any]:
    """Settings that somebody set, but keys and addresses; they stay as they are unless they are knobs."""
    known = list_settings()
    found = {name: value_of(resolved.config, known[name]) for name, origin in resolved.origin.items()
             if origin != "default" and name not in PRIVATE}
    if pairs := found.pop("platform_option", None):
        found["platform_option"] = dict(pair.partition("=")[::2] for pair in pairs)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def _start(resolved: Resolved, knobs: list[Knob]) -> dict[str, Any]:
    """The values of the knobs' settings as they are; where a named knob lacks it, its first one is the beginning."""
    known = list_settings()
    options = dict(pair.partition("=")[::2] for pair in resolved.config.platform.platform_option)
    found: dict[str, Any] = {f"{OPTION}{name}": value for name, value in options.items()}
    found |= {name: value_of(resolved.config, known[name]) for name in DEFAULTS}
    for knob in knobs:
        here = found.get(knob.name) if knob.name.startswith(OPTION) else value_of(resolved.config, known[knob.name])
        if here not in knob.values:
            raise ConfigError(f"--knob {knob.name}: its value now, {here}, is not among those to try: put it where it "
                              "belongs in their order")
        found[knob.name] = here
    return found


class Trials:
    """Starts a server with the settings, loads it, and ends it. key: that it asks for where a variable sets one.
    platform: of the last one, as it says."""

    def __init__(self, arguments: argparse.Namespace, base: Mapping[str, Any], load: Any, slo: Any, goal: str,
                 key: str | None = None):
        self.arguments, self.base, self.load, self.slo, self.goal = arguments, base, load, slo, goal
        self.line: Any = None
        self.key = key
        self.platform = ""

    def measure(self, changes: Settings, part: str, number: int, limit: float) -> Trial:
        """One trial; what fails is told in it."""
        from ..bench.tune import Trial
        self.line(f"{part} run with {shown_changes(changes)}")
        began = time.monotonic()
        try:
            figures = self._run(changes, part, number, limit)
            failed = figures["failed"]
            reason = f"{failed:.0f} requests failed" if failed and not self.slo else ""
            return Trial(dict(changes), part, number, 0.0 if reason else self._score(figures),
                         time.monotonic() - began, figures, reason, self.platform)
        except TimeoutError:
            reason = f"stopped after {limit:.0f} s"
        except IsthmusError as error:
            reason = said(error)[:300]
        return Trial(dict(changes), part, number, 0.0, time.monotonic() - began, {}, reason)

    def _score(self, figures: Mapping[str, float]) -> float:
        """More is better."""
        from ..bench.result import FIGURES
        value = figures.get(self.goal, 0.0)
        return value if FIGURES[self.goal].better > 0 else 1 / value if value > 0 else 0.0

    def _run(self, changes: Settings, part: str, number: int, limit: float) -> dict[str, float]:
        from ..bench.drive import run_loop
        from ..bench.servers import Started
        from ..bench.serving import measure, warm_up
        from ..bench.tune import SCREEN, yaml_text
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trial.yaml")
            path.write_text(yaml_text(trial_settings(self.base, changes), ()), "utf-8")
            ends = time.monotonic() + limit
            with Started(f"isthmus serve --config {path}", limit, quiet_environment()) as started:
                server = find_server(started.url, None, self.key, self.arguments.turns > 1,
                                     min(limit, self.arguments.timeout))
                self.platform = str(server.subject["server"].get("platform", ""))
                given = argparse.Namespace(**vars(self.arguments))
                if part == "screen":
                    given.requests = max(1, given.requests // SCREEN)
                    given.asked_requests = given.requests if given.asked_requests is None else max(
                        1, given.asked_requests // SCREEN)
                workload = make_workload(given, server.vocab, not server.takes_ids, number)

                async def bounded() -> Any:
                    async with asyncio.timeout(max(0.1, ends - time.monotonic())):
                        await warm_up(server, 2)
                        return await measure(server, workload, self.load, self.slo)
                return dict(run_loop(bounded()).figures)


def trial_settings(base: Settings, changes: Settings) -> dict[str, Any]:
    """Of a server that is only measured."""
    from ..bench.tune import merged
    return {name: value for name, value in merged(base, changes).items() if name not in KEPT}


def quiet_environment() -> dict[str, str]:
    """Variables that count as unset: what they say is in a trial's file, over which they would win."""
    return {setting.variable: "" for name, setting in list_settings().items() if name not in PRIVATE}


def shown_changes(changes: Settings) -> str:
    texts = {name.removeprefix(OPTION): ",".join(value) or OFF if isinstance(value, list | tuple) else value
             for name, value in changes.items()}
    return ", ".join(f"{name} {value}" for name, value in texts.items()) or "nothing changed"


def tell(trial: Trial, verdict: str) -> None:
    score = f"{trial.score:,.2f}" if trial.score else "-"
    print(f"{score:>12}  {shown_changes(trial.changes)}: {verdict}", flush=True)


def _write(path: Path, search: Any, base: Mapping[str, Any], goal: str) -> None:
    from ..bench.result import about_here
    from ..bench.tune import merged, yaml_text
    if not search.score:
        raise ConfigError("the time was over before the settings to begin with were measured: give more --minutes")
    first = next(search.tried()).score
    made = about_here()
    comment = [f"by isthmus tune, {made['date']}: {json.dumps(made['command'])}",
               f"{goal}: {search.score:.4g} (score; {first:.4g} where it began), {len(list(search.tried()))} "
               f"measurements, {'no neighbour is better' if search.finished else 'stopped when the time was over'}",
               f"on {made['machine']['processor']}, {made['machine']['cores']} cores"]
    part = path.with_name(f".{path.name}.new")
    part.write_text(yaml_text(merged(base, search.best), comment), "utf-8")
    part.replace(path)
    print(f"{path}: {shown_changes(search.best)}\n{comment[1]}")
