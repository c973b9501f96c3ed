"""`isthmus bench compare`: two servers in turn, or two results, and whether one is really better."""
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..settings import Resolved
from .backends import own_key
from .bench_load import add_load_arguments, add_workload_arguments, check_workload, make_loads, make_workload
from .bench_server import add_run_arguments, check_result_files, find_server, give, watched

if TYPE_CHECKING:
    from ..bench.evidence import Verdict
    from ..bench.result import Result, Run
    from ..bench.serving import Server

MAX_ROUNDS = 1000
FAILED = 1
NOT_IN_TURN = ("the two were not measured in turn: whatever changed on the machine between them is in the ratios. "
               "`isthmus bench compare` with two servers or commands measures them in turn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("a", "b"):
        parser.add_argument(name, nargs="?", metavar=name.upper(), help="a server's URL, a command in quotes that "
                            "starts one, or a result file")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="pairs of runs [7]")
    parser.add_argument("--fresh", action="store_true", help="start the servers anew for each run")
    parser.add_argument("--margin", type=float, default=0.0, metavar="SHARE",
                        help="a winner must be better by more than this [0]")
    add_run_arguments(parser)
    add_workload_arguments(parser)
    add_load_arguments(parser, several=False)


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    """0 when every request was answered, else 1; who wins does not matter."""
    if not arguments.a or not arguments.b:
        raise ConfigError("two are compared: `isthmus bench compare A B`, each a URL, a command in quotes or a result")
    if not 0 <= arguments.margin <= 10:
        raise ConfigError(f"--margin {arguments.margin:g}: it must be between 0 and 10")
    check_result_files(arguments)
    files = [_is_file(text) for text in (arguments.a, arguments.b)]
    if any(files):
        if not all(files):
            raise ConfigError("a result file is compared with a result file, a server with a server")
        result, told = _files(arguments)
    else:
        result, told = _servers(arguments, resolved)
    give(result, told, arguments)
    return FAILED if any(run.figures.get("failed") for run in result.runs) else 0


def _is_file(text: str) -> bool:
    return text.endswith(".json") and " " not in text


def _files(arguments: argparse.Namespace) -> tuple[Result, list[str]]:
    """Two results, by the labels of their runs."""
    from ..bench.evidence import judge_all, without_ratio
    from ..bench.result import Result, Run, read_result
    sides = [read_result(Path(text)) for text in (arguments.a, arguments.b)]
    if sides[0].kind != sides[1].kind:
        raise ConfigError(f"{arguments.a} is of `bench {sides[0].kind}`, {arguments.b} of `bench {sides[1].kind}`: "
                          "they have no figures in common")
    labels = [label for label in dict.fromkeys(run.label for run in sides[0].runs)
              if any(run.label == label for run in sides[1].runs)]
    if not labels:
        raise ConfigError(f"{arguments.a} and {arguments.b} have no load or case in common")
    told, verdicts = [f"A: {arguments.a}", f"B: {arguments.b}"], {}
    for label in labels:
        a, b = ([run.figures for run in side.runs if run.label == label] for side in sides)
        verdicts[label] = judge_all(a, b, False, arguments.margin)
        told += [f"{label}:", *_lines(verdicts[label], without_ratio(a, b))]
    notes = [NOT_IN_TURN]
    differ = [key for key in {**sides[0].configuration, **sides[1].configuration}
              if sides[0].configuration.get(key) != sides[1].configuration.get(key)]
    if differ:
        notes.append(f"they were not asked the same: {', '.join(differ)} differ")
    machines = [{k: v for k, v in side.made.get("machine", {}).items() if k != "load"} for side in sides]
    if machines[0] != machines[1]:
        notes.append("they were measured on different machines")
    runs = [Run(label, {}, {"verdicts": [vars(v) for v in found]}) for label, found in verdicts.items()]
    about = {"a": arguments.a, "b": arguments.b, "interleaved": False, "margin": arguments.margin}
    return Result("compare", {"A": sides[0].subject, "B": sides[1].subject}, about, runs, notes), told + [
        f"note: {note}" for note in notes]


def _servers(arguments: argparse.Namespace, resolved: Resolved) -> tuple[Result, list[str]]:
    """Pairs of runs on two servers, the first of a pair being A and B in turn."""
    from ..bench.evidence import judge_all, without_ratio
    from ..bench.recorder import read_slo
    from ..bench.result import Result, hidden
    check_workload(arguments)
    (load, *more), slo = make_loads(arguments), read_slo(arguments.slo)
    if more:
        raise ConfigError("one load is compared at a time: give one --concurrency or one --rate")
    if not 1 <= arguments.rounds <= MAX_ROUNDS:
        raise ConfigError(f"--rounds {arguments.rounds}: it must be between 1 and {MAX_ROUNDS}")
    with watched() as line:
        runs, subjects, workload, notes = _rounds(arguments, own_key(resolved), load, slo, line)
    sides = {side: [run.figures for run in runs if run.detail["side"] == side] for side in "AB"}
    verdicts = judge_all(sides["A"], sides["B"], True, arguments.margin)
    about = {"a": hidden(arguments.a), "b": hidden(arguments.b), "interleaved": True, "rounds": arguments.rounds,
             "fresh": arguments.fresh, "margin": arguments.margin, "workload": workload.name, **workload.facts,
             "load": load.facts, "slo_seconds": slo, "verdicts": [vars(v) for v in verdicts]}
    told = [f"A: {about['a']}", f"B: {about['b']}",
            f"{workload.name}, {workload.requests} requests, {load}, {arguments.rounds} pairs, in turn",
            *_lines(verdicts, without_ratio(sides["A"], sides["B"])), *(f"note: {note}" for note in notes)]
    for side in "AB":
        if failed := sum(figures["failed"] for figures in sides[side]):
            told.append(f"{side}: {failed:.0f} requests failed; its times are of the others")
    return Result("compare", subjects, about, runs, notes), told


def _rounds(arguments: argparse.Namespace, key: str | None, load: Any, slo: Any,
            line: Callable[..., None]) -> tuple[list[Run], dict[str, Any], Any, list[str]]:
    from ..bench.drive import run_loop
    from ..bench.result import Run
    from ..bench.serving import measure
    runs, subjects, notes, workload = [], {}, {}, None
    places = {"A": arguments.a, "B": arguments.b}
    with ExitStack() as stack:
        kept = {} if arguments.fresh else {
            side: stack.enter_context(open_server(text, arguments, key, line)) for side, text in places.items()}
        for number in range(arguments.rounds):
            for side in "AB" if number % 2 == 0 else "BA":
                line(f"round {number + 1} of {arguments.rounds}: {side}")
                with ExitStack() as own:
                    server = kept.get(side) or own.enter_context(open_server(places[side], arguments, key, line))
                    workload = make_workload(arguments, server.vocab, not server.takes_ids, number)
                    run = run_loop(measure(server, workload, load, slo))
                runs.append(Run(f"{side} {number + 1}", run.figures, {**run.detail, "side": side, "round": number}))
                subjects[side] = server.subject
                notes |= dict.fromkeys(f"{side}: {note}" for note in server.notes)
    return runs, subjects, workload, list(notes)


@contextmanager
def open_server(text: str, arguments: argparse.Namespace, key: str | None,
                line: Callable[..., None]) -> Iterator[Server]:
    """The server at a URL, or one that a command starts, warmed up."""
    from ..bench.drive import run_loop
    from ..bench.result import hidden
    from ..bench.servers import Started
    from ..bench.serving import warm_up
    with ExitStack() as stack:
        url = text
        if " " in text.strip() or "://" not in text and ":" not in text:
            line(f"start {hidden(text)}")
            url = stack.enter_context(Started(text, arguments.ready_timeout)).url
        line(f"ask {url} for a token")
        server = find_server(url, None, key, arguments.turns > 1, arguments.timeout)
        if arguments.warmup > 0:
            run_loop(warm_up(server, arguments.warmup))
        yield server


def _lines(verdicts: Sequence[Verdict], apart: Mapping[str, tuple[float, float]]) -> list[str]:
    """A row for each figure, with what may be said of it. apart: medians where there is no ratio."""
    from ..bench.picture import text_of
    from ..bench.result import FIGURES, shown_figure
    from ..chart import Table
    if not verdicts and not apart:
        return ["  no figure is above 0 in all runs of both"]
    rows = [[FIGURES[v.figure].label, shown_figure(v.figure, v.a), shown_figure(v.figure, v.b), f"{v.ratio:.3f}",
             f"{v.low:.3f} to {v.high:.3f}" if v.high > v.low else "-",
             v.winner if v.winner != "none" else f"no winner: {v.reason}"] for v in verdicts]
    rows += [[FIGURES[name].label, *(shown_figure(name, median) for median in medians), "-", "-",
              "no ratio: a run has 0"] for name, medians in apart.items()]
    return text_of(Table(["", "A", "B", "A is better by", "95 % interval", "verdict"], rows))
