"""`isthmus bench startup`: from the command to the first token, by stage, with files in the cache and without."""
from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from ..errors import ConfigError
from ..settings import Resolved
from .backends import own_key
from .bench_server import add_result_arguments, check_result_files, find_server, give, watched

DEFAULT = "isthmus serve"
FAILED, MAX_REPEAT = 1, 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("server", nargs="?", default=DEFAULT, metavar="COMMAND",
                        help=f"in quotes, that starts the server, with {{port}} if it is not isthmus [{DEFAULT}]")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="warm starts [3]")
    parser.add_argument("--cold", type=Path, action="append", default=[], metavar="PATH",
                        help="before each of as many cold starts, drop this file or folder from the system's cache; "
                        "may be repeated. The server's model unless given")
    parser.add_argument("--no-cold", action="store_true", help="warm starts only")
    parser.add_argument("--ready-timeout", type=float, default=600.0, metavar="SECONDS", help="for one start [600]")
    add_result_arguments(parser)


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    """0 when every start answered, else 1."""
    if not 1 <= arguments.repeat <= MAX_REPEAT:
        raise ConfigError(f"--repeat {arguments.repeat}: it must be between 1 and {MAX_REPEAT}")
    if arguments.no_cold and arguments.cold:
        raise ConfigError("--cold and --no-cold: leave one out")
    for path in arguments.cold:
        if not path.exists():
            raise ConfigError(f"--cold {path}: there is no such file or folder")
    check_result_files(arguments)
    from ..bench import startup
    from ..bench.picture import table_of, text_of
    from ..bench.result import Result, hidden
    key, notes = own_key(resolved), []

    def look(url: str):
        return find_server(url, None, key)
    with watched() as line:
        line("the first start, which does not count")
        _, server = startup.measure(arguments.server, "first", arguments.ready_timeout, look)
        files = arguments.cold or _model_of(server.subject)
        runs = []
        for number in range(arguments.repeat):
            line(f"start {number + 1} of {arguments.repeat}, warm")
            runs.append(startup.measure(arguments.server, "warm", arguments.ready_timeout, look)[0])
            if arguments.no_cold or not files:
                continue
            line(f"start {number + 1} of {arguments.repeat}, cold")
            if not sum(map(startup.forget_files, files)):
                notes = ["the system drops no files from its cache on request: cold starts were warm"]
            runs.append(startup.measure(arguments.server, "cold", arguments.ready_timeout, look)[0])
    if not files and not arguments.no_cold:
        notes.append("the server does not say where its model is: name it with --cold for cold starts")
    about = {"command": hidden(arguments.server), "repeat": arguments.repeat, "cold": [str(path) for path in files]}
    told = [f"{about['command']}: {server.subject['model']}",
            *text_of(table_of(_medians(runs), ("ready_s", "first_token_s", "ttft_p50", "cpu_s", "resident_bytes")))]
    for label in ("warm", "cold"):
        if stages := _stages([r.detail["stages"] for r in runs if r.label == label]):
            told.append(f"  {label}: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in stages))
    give(Result("startup", server.subject, about, runs, notes), told + [f"note: {n}" for n in notes], arguments)
    return FAILED if any(run.figures["failed"] for run in runs) else 0


def _model_of(subject) -> list[Path]:
    """Where the server's model lies, as it says."""
    path = Path(str(subject["server"].get("model_path", "")) or "/no/path")
    return [path] if path.exists() else []


def _medians(runs):
    from ..bench.result import Run
    labels = list(dict.fromkeys(run.label for run in runs))
    sides = {label: [run.figures for run in runs if run.label == label] for label in labels}
    return [Run(label, {name: statistics.median(f[name] for f in figures) for name in figures[0]
                        if all(name in f for f in figures)}) for label, figures in sides.items()]


def _stages(found: list[list[tuple[str, float]]]) -> list[tuple[str, float]]:
    """Medians of the stages that all starts had, in their order."""
    if not found:
        return []
    tables = [dict(stages) for stages in found]
    return [(name, statistics.median(table[name] for table in tables)) for name, _ in found[0]
            if all(name in table for table in tables)]
