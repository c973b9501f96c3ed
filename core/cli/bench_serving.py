"""`isthmus bench serving`: a load on a server, and what its users would have felt."""
from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..files import check_written
from ..settings import Resolved
from .backends import own_key
from .bench_load import add_load_arguments, add_workload_arguments, check_workload, make_loads, make_workload
from .bench_server import add_result_arguments, check_result_files, find_server, give, watched, written
from .launch import running_url
from .top import can_draw, sparkline

if TYPE_CHECKING:
    from ..bench.result import Result, Run
    from ..bench.serving import Server

MAX_REPEAT, MAX_WARM = 1000, 10_000
FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="the server; the one that runs here unless given")
    parser.add_argument("--model", metavar="NAME", help="one of its models; its first unless given")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="requests before, that do not count [2]")
    parser.add_argument("--repeat", type=int, default=1, metavar="N",
                        help="measure so often, each time with other prompts, for `bench compare` [1]")
    parser.add_argument("--save-requests", type=Path, metavar="FILE", help="a line of JSON for each request")
    add_result_arguments(parser)
    add_workload_arguments(parser)
    add_load_arguments(parser)


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    """0 when every request was answered, else 1."""
    from ..bench.recorder import read_slo
    check_workload(arguments)
    loads = make_loads(arguments)
    for name, least, most in (("warmup", 0, MAX_WARM), ("repeat", 1, MAX_REPEAT)):
        if not least <= getattr(arguments, name) <= most:
            raise ConfigError(f"--{name} {getattr(arguments, name)}: it must be between {least} and {most}")
    check_result_files(arguments)
    if arguments.save_requests is not None:
        check_written(arguments.save_requests, "--save-requests")
    read_slo(arguments.slo)
    url = arguments.url or running_url(resolved)
    with watched() as line:
        line(f"ask {url} for a token")
        server = find_server(url, arguments.model, own_key(resolved), arguments.turns > 1, arguments.timeout)
        result = serve_load(arguments, loads, server, line)
    give(result, lines(result), arguments)
    return FAILED if any(run.figures["failed"] for run in result.runs) else 0


def serve_load(arguments: argparse.Namespace, loads: Sequence, server: Server, line: Callable[..., None]) -> Result:
    """Every load in turn, as often as is to be repeated. line: is told how far it is."""
    from ..bench.drive import run_loop
    from ..bench.recorder import read_slo
    from ..bench.result import Result
    from ..bench.serving import measure, warm_up
    slo, runs, workload = read_slo(arguments.slo), [], None
    path = arguments.save_requests
    with written("--save-requests", path) if path else nullcontext(), \
            path.open("w", encoding="utf-8") if path else nullcontext() as rows:
        if arguments.warmup:
            line("warm up")
            run_loop(warm_up(server, arguments.warmup))
        for number in range(arguments.repeat):
            for each, load in enumerate(loads):
                # Other prompts each time: those of the run before are in the server's cache.
                workload = make_workload(arguments, server.vocab, not server.takes_ids, number * len(loads) + each)
                stage = f"send requests, {load}" if len(loads) * arguments.repeat > 1 else "send requests"
                runs.append(run_loop(measure(server, workload, load, slo, rows,
                                             lambda done, total, stage=stage: line(stage, done, total))))
    from ..bench.serving import told_of_client
    notes = [*server.notes, *dict.fromkeys(filter(None, map(told_of_client, runs)))]
    configuration = {"workload": workload.name, **workload.facts, "seed": arguments.seed, "slo_seconds": slo,
                     "loads": [load.facts for load in loads], "repeat": arguments.repeat, "warmup": arguments.warmup}
    return Result("serving", server.subject, configuration, runs, notes)


def lines(result: Result) -> list[str]:
    """The result for people: one run in full, several as a table."""
    from ..bench.picture import COLUMNS, table_of, text_of
    about = result.configuration
    told = [f"{about['workload']} on {result.subject['model']} at {result.subject['url']}"]
    told += one_run(result.runs[0]) if len(result.runs) == 1 else text_of(table_of(result.runs, COLUMNS))
    for run in result.runs:
        for kind, count in run.detail["errors"].items():
            said = "; ".join(run.detail["error_examples"][kind])
            told.append(f"  {count} failed ({run.label}): {kind}: {said}")
    return told + [f"note: {note}" for note in result.notes]


def one_run(run: Run) -> list[str]:
    """One run's figures, with a picture of the output over the time."""
    figures, times = run.figures, run.detail["percentiles"]
    told = [f"{figures['requests']:.0f} requests, {run.label}, in {figures['seconds']:.1f} s: "
            f"{figures['failed']:.0f} failed"]
    if figures["failed"] == figures["requests"]:
        return told
    hits = f", {figures['hit_rate']:.0%} of their tokens found in the cache" if "hit_rate" in figures else ""
    speeds = run.detail["timeline"]["output_tokens_per_s"]
    rows = [("output", f"{figures['output_tokens_per_s']:,.1f} tokens/s, {figures['requests_per_s']:,.2f} requests/s"),
            ("prompts", f"{figures['prompt_tokens_per_s']:,.0f} tokens/s{hits}")]
    if "within_slo" in figures:
        rows.append(("goodput", f"{figures['goodput_per_s']:,.2f} requests/s, {figures['within_slo']:.1%} of all are "
                                "within the SLO"))
    rows += [(label, ", ".join(f"{q} {1e3 * value:,.1f} ms" for q, value in times[name].items()))
             for name, label in (("ttft", "first token"), ("tpot", "per token"), ("itl", "between"),
                                 ("e2e", "whole answer"))]
    if run.detail["load"]["loop"] == "open" and times["late"]["max"] > 0.05:
        rows.append(("sent late", ", ".join(f"{q} {1e3 * value:,.1f} ms" for q, value in times["late"].items())))
    rows.append(("over time", f"{sparkline(deque(speeds[-60:]), not can_draw())} up to {max(speeds):,.0f} tokens/s"))
    return [*told, *(f"  {name:13}{text}" for name, text in rows if text)]
