"""`isthmus bench joint`: speed, share of requests within the SLO and accuracy of configurations, in one table."""
from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, RequestError
from ..files import read_text
from ..settings import Resolved
from .backends import RemoteBackend, own_key
from .bench_compare import open_server
from .bench_load import add_load_arguments, add_workload_arguments, check_workload, make_loads, make_workload
from .bench_server import add_run_arguments, check_result_files, give, watched

if TYPE_CHECKING:
    from ..bench.quality import Scores
    from ..bench.result import Run

SCORE_S = 600.0
MAX_TEXT = 1 << 20  # characters
MAX_ROUNDS = 1000
FAILED = 1
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
COLUMNS = ("output_tokens_per_s", "goodput_per_s", "within_slo", "ttft_p50", "ttft_p99", "tpot_p50", "perplexity",
           "perplexity_delta", "agreement", "logprob_error", "failed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("servers", nargs="*", metavar="SERVER",
                        help="a command in quotes that starts a server, or a URL; the first is the reference")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of all of them, in turn [3]")
    parser.add_argument("--fresh", action="store_true",
                        help="one server at a time, started anew for each run: for what does not fit together")
    parser.add_argument("--score-text", type=Path, metavar="FILE", help="the text to be scored [one that is shipped]")
    parser.add_argument("--allow", type=float, default=0.01, metavar="SHARE",
                        help="rise of perplexity from which a configuration is said to cost answers [0.01]")
    add_run_arguments(parser)
    add_workload_arguments(parser)
    add_load_arguments(parser, several=False)


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    """0 when every request was answered, else 1."""
    if not 2 <= len(arguments.servers) <= len(LETTERS):
        raise ConfigError(f"two to {len(LETTERS)} configurations are measured: `isthmus bench joint REFERENCE SERVER "
                          "...`, commands in quotes or URLs")
    if not 1 <= arguments.rounds <= MAX_ROUNDS:
        raise ConfigError(f"--rounds {arguments.rounds}: it must be between 1 and {MAX_ROUNDS}")
    if not 0 <= arguments.allow <= 10:
        raise ConfigError(f"--allow {arguments.allow:g}: it must be between 0 and 10")
    check_workload(arguments)
    check_result_files(arguments)
    (load, *more), texts = make_loads(arguments), _texts(arguments.score_text)
    if more:
        raise ConfigError("one load is measured at a time: give one --concurrency or one --rate")
    from ..bench.picture import table_of, text_of
    from ..bench.quality import beside
    from ..bench.recorder import read_slo
    from ..bench.result import Result, hidden
    slo = read_slo(arguments.slo)
    with watched() as line:
        rounds, scores, subjects, about = _measure(arguments, own_key(resolved), load, slo, texts, line)
    runs, told = [], []
    for letter, name in zip(LETTERS, arguments.servers, strict=False):
        every = [run.figures for run in rounds[name]]
        figures = {key: statistics.median(f[key] for f in every) for key in every[0] if all(key in f for f in every)}
        figures |= beside(scores[name], scores[arguments.servers[0]])
        figures["failed"] = sum(f["failed"] for f in every)
        runs.append(_run(letter, hidden(name), figures, every))
        verdict = _verdict(figures, runs[0].figures, arguments.allow, letter == "A")
        told.append(f"  {letter}: {hidden(name)}: {verdict}")
    tokens = len(scores[arguments.servers[0]].tokens)
    configuration = {**about, "load": load.facts, "slo_seconds": slo, "rounds": arguments.rounds,
                     "scored_tokens": tokens, "allow": arguments.allow}
    head = f"{about['workload']}, {load}, {arguments.rounds} rounds in turn; accuracy on {tokens} tokens"
    give(Result("joint", subjects, configuration, runs), [head, *text_of(table_of(runs, COLUMNS)), *told], arguments)
    return FAILED if any(run.figures["failed"] for run in runs) else 0


def _run(letter: str, name: str, figures: dict[str, float], every: list[Any]) -> Run:
    from ..bench.result import Run
    return Run(letter, figures, {"server": name, "rounds": [dict(f) for f in every]})


def _texts(path: Path | None) -> list[str]:
    if path is None:
        from ..bench.text import PASSAGES
        return list(PASSAGES)
    try:
        text = read_text(path, MAX_TEXT)
    except OSError as error:
        raise ConfigError(f"--score-text {path}: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:
        raise ConfigError(f"--score-text {path}: {error}") from None
    parts = [part for part in text.split("\n\n") if len(part.split()) > 1]
    if not parts:
        raise ConfigError(f"--score-text {path}: there is no text in it")
    return parts


def _measure(arguments: argparse.Namespace, key: str | None, load: Any, slo: Any, texts: list[str],
             line: Callable[..., None],
             ) -> tuple[dict[str, list[Run]], dict[str, Scores], dict[str, Any], dict[str, Any]]:
    """Runs and scores of each; the order is turned about from round to round."""
    from ..bench.drive import run_loop
    from ..bench.result import hidden
    from ..bench.serving import measure
    names, about = list(dict.fromkeys(arguments.servers)), {}
    if len(names) < len(arguments.servers):
        raise ConfigError("one configuration is named twice; `isthmus bench compare` shows what noise there is")
    rounds: dict[str, list[Run]] = {name: [] for name in names}
    scores: dict[str, Scores] = {}
    subjects: dict[str, Any] = {}
    with ExitStack() as stack:
        kept = {} if arguments.fresh else {
            name: stack.enter_context(open_server(name, arguments, key, line)) for name in names}
        for number in range(arguments.rounds):
            for name in names[number % len(names):] + names[:number % len(names)]:
                with ExitStack() as own:
                    server = kept.get(name) or own.enter_context(open_server(name, arguments, key, line))
                    if name not in scores:
                        line(f"score the text: {hidden(name)}")
                        scores[name] = _score(server, key, texts)
                    line(f"round {number + 1} of {arguments.rounds}: {hidden(name)}")
                    workload = make_workload(arguments, server.vocab, not server.takes_ids, number)
                    rounds[name].append(run_loop(measure(server, workload, load, slo)))
                subjects[hidden(name)] = dict(server.subject)
                about = {"workload": workload.name, **workload.facts}
    return rounds, scores, subjects, about


def _score(server: Any, key: str | None, texts: list[str]) -> Scores:
    from ..bench.quality import score
    backend = RemoteBackend(server.subject["url"], None, key, SCORE_S)

    def ask(body: Any) -> Any:
        try:
            return backend.get_json("POST", backend.path + "/completions", body)
        except ValueError as error:
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"{backend.address}: {error}", status=502) from None
    return score(ask, server.target.model, texts)


def _verdict(figures: dict[str, float], reference: Any, allow: float, is_reference: bool) -> str:
    """Speed and accuracy beside the reference's, in words."""
    if is_reference:
        return "the reference"
    most, mine = reference.get("output_tokens_per_s"), figures.get("output_tokens_per_s", 0.0)
    speed = f"{mine / most:.2f} times the reference's output" if most else "the reference has no output"
    delta = figures["perplexity_delta"]
    costs = f"costs answers: its perplexity is {delta:+.1%}" if delta > allow else f"perplexity {delta:+.2%}"
    if "agreement" in figures:
        costs += f", the best token is the same in {figures['agreement']:.1%} of places"
    else:
        costs += " by character; its tokens are not the reference's"
    return f"{speed}; {costs}"
