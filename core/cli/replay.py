"""`isthmus replay`: what a trace of requests would have found in the cache, policy by policy."""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, shown
from ..files import check_written, is_there
from .progress import ProgressLine

if TYPE_CHECKING:
    from ..replay.run import Capacity

PATIENCE = 2.0      # seconds before progress is shown
LARGE = 16 * 2**20  # bytes of a trace that takes about as long to read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, nargs="?", metavar="TRACE",
                        help="Mooncake or plain JSONL, Azure CSV, binary")
    parser.add_argument("--policy", action="append", metavar="NAMES",
                        help="eviction policies, default, lru-leaf, lru-block, optimal, separated by commas "
                        "[default,lru-leaf,lru-block,optimal]")
    parser.add_argument("--capacity", default="1,5,10,25,50", metavar="LIST",
                        help="up to 100: percent of the trace's different tokens; above: tokens [1,5,10,25,50]")
    parser.add_argument("--hint-endings", type=float, default=0.0, metavar="SHARE",
                        help="share of the requests whose text is never asked for again that say so [0]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn [0]")
    parser.add_argument("--requests", type=int, metavar="N", help="take the first N requests only")
    parser.add_argument("--block-tokens", type=int, metavar="N", help="tokens in a block where the trace does not say")
    parser.add_argument("--latency", metavar="NAME|FILE", help="run the scheduler too, on a platform this fast")
    parser.add_argument("--schedule-policy", default="lpm", metavar="NAME", help="of the scheduler [lpm]")
    parser.add_argument("--slo-ttft", type=float, default=2.0, metavar="SECONDS", help="first token within [2]")
    parser.add_argument("--slo-tpot", type=float, default=0.1, metavar="SECONDS", help="a token each, on average [0.1]")
    parser.add_argument("--plot", type=Path, action="append", default=[], metavar="FILE", help="a .png or .html file")
    parser.add_argument("--json", action="store_true", help="print JSON; rates are shares from 0 to 1")
    parser.add_argument("--convert", type=Path, metavar="FILE",
                        help="write the trace as .jsonl or .bin instead of running it")


def run(arguments: argparse.Namespace, resolved: Any) -> int:
    from ..replay.formats import read_trace
    from ..replay.plot import write_plot
    from ..replay.run import replay
    order = _order(arguments)
    with ProgressLine(sys.stderr) as line:
        with suppress(OSError):  # reading it tells more
            if (size := arguments.trace.stat().st_size) > LARGE:
                line(f"read {arguments.trace.name}", 0, size)
        trace = read_trace(arguments.trace, arguments.block_tokens, arguments.seed)
        if arguments.requests:
            trace = trace.head(arguments.requests)
        if arguments.convert:
            return _convert(trace, arguments.convert)
        report = replay(trace, order, _patient(line))
    print(json.dumps(report, ensure_ascii=False) if arguments.json else _text(report))
    for path in arguments.plot:
        with _written("--plot", path):
            write_plot(report, path)
    return 0


@contextmanager
def _written(option: str, path: Path) -> Iterator[None]:
    """What the system says when the file cannot be written, for people."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: {(error.strerror or str(error)).lower()}") from None


def _order(arguments: argparse.Namespace) -> Any:
    if arguments.trace is None:
        raise ConfigError("no trace is named: `isthmus replay FILE`; its formats are in docs/replay.md")
    from ..replay.latency import read_latency_model
    from ..replay.run import COMPARED, Order, check_policies
    from ..replay.trace import MAX_TOKENS
    from ..scheduler.policy import POLICIES
    names = [n.strip() for part in arguments.policy or [",".join(COMPARED)] for n in part.split(",") if n.strip()]
    if not names:
        raise ConfigError("--policy names none")
    check_policies(names)
    if arguments.schedule_policy not in POLICIES.names():
        raise ConfigError(f"--schedule-policy {arguments.schedule_policy} is not one of {', '.join(POLICIES)}")
    if not 0 <= arguments.hint_endings <= 1:
        raise ConfigError(f"--hint-endings {arguments.hint_endings:g} is outside 0 to 1")
    for name, least in (("seed", 0), ("requests", 1), ("block_tokens", 1), ("slo_ttft", 0), ("slo_tpot", 0)):
        value = getattr(arguments, name)
        if value is not None and not value >= least:
            raise ConfigError(f"--{name.replace('_', '-')} {shown(value)} is below {least}")
    if arguments.block_tokens is not None and arguments.block_tokens >= MAX_TOKENS:
        raise ConfigError(f"--block-tokens {shown(arguments.block_tokens)}: fewer than {MAX_TOKENS} are allowed")
    _check_files(arguments)
    model = read_latency_model(arguments.latency) if arguments.latency else None
    return Order(tuple(dict.fromkeys(names)), _capacities(arguments.capacity), arguments.hint_endings, arguments.seed,
                 model, arguments.schedule_policy, arguments.slo_ttft, arguments.slo_tpot)


def _check_files(arguments: argparse.Namespace) -> None:
    """Can the files that are to be written be written? Before the run, which may take long."""
    from ..replay.plot import check_plot
    for option, path in [("--plot", path) for path in arguments.plot] + [("--convert", arguments.convert)]:
        if path is None:
            continue
        if is_there(check_written(path, option)) and is_there(arguments.trace) and path.samefile(arguments.trace):
            raise ConfigError(f"{option} {path} is the trace itself: name another file")
        if option == "--plot":
            check_plot(path)
        elif path.suffix not in (".jsonl", ".bin"):
            raise ConfigError(f"{option} {path}: the name must end with .jsonl or .bin")


def _capacities(text: str) -> tuple[Capacity, ...]:
    from ..replay.run import Capacity
    found = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        try:
            value = float(part.removesuffix("%"))
        except ValueError:
            value = -1.0
        if not 0 < value < 1e15 or part.endswith("%") and value > 100:
            raise ConfigError(f"--capacity {part}: neither a percentage such as 5 nor a size such as 200000 tokens")
        found.append(Capacity(value, value <= 100))
    if not found:
        raise ConfigError("--capacity names none")
    return tuple(found)


def _convert(trace: Any, path: Path) -> int:
    from ..replay.formats import write_binary, write_jsonl
    with _written("--convert", path):
        (write_jsonl if path.suffix == ".jsonl" else write_binary)(trace, path)
    print(f"{path}: {len(trace):,} requests in blocks of {trace.block} tokens")
    return 0


def _patient(line: ProgressLine) -> Callable[[str, int, int], None]:
    began = time.monotonic()

    def show(stage: str, done: int, total: int) -> None:
        if time.monotonic() - began > PATIENCE:
            line(stage, done, total)
    return show


def _text(report: dict[str, Any]) -> str:
    results = report["results"]
    capacities = list(dict.fromkeys((r["capacity"], r["capacity_unit"]) for r in results))
    heads = [f"{c:,} %" if unit == "percent" else f"{c:,} tok" for c, unit in capacities]
    lines = [f"{report['trace']}, {report['form']}, blocks of {report['block_tokens']} tokens: "
             f"{report['requests']:,} requests in {report['seconds']:,.0f} s",
             f"{report['input_tokens']:,} prompt tokens; {report['working_set_tokens']:,} different ones in whole "
             "blocks",
             f"an endless cache would hit {report['token_hit_rate_of_endless_cache']:.1%}; default is "
             f"{report['default_policy']}"
             + (f"; {report['hinted_requests']:,} requests are hinted to end" if report["hinted_requests"] else ""),
             "", f"{'token hit rate, %':18}" + "".join(f"{h:>12}" for h in heads)]
    for policy in dict.fromkeys(r["policy"] for r in results):
        rates = [100 * r["token_hit_rate"] for r in results if r["policy"] == policy]
        lines.append(f"{policy:18}" + "".join(f"{rate:12.2f}" for rate in rates))
    served = [r for r in results if "served" in r]
    if served:
        slo = served[0]["served"]["slo"]
        times = "".join(f"{name + ' p50':>10}{'p90':>9}{'p99':>9}" for name in ("TTFT", "ITL"))
        lines += ["", f"served (goodput: first token within {slo['ttft_s']:g} s, {slo['tpot_s']:g} s a token)",
                  f"{'policy':12}{'capacity':>14}{times}{'goodput':>14}{'hit rate':>10}{'preempted':>11}"]
        lines += [_served_line(r) for r in served]
    return "\n".join(lines)


def _served_line(result: dict[str, Any]) -> str:
    told, unit = result["served"], " %" if result["capacity_unit"] == "percent" else " tok"
    shown = lambda value, width: f"{'-':>{width}}" if value is None else f"{value:{width}.3f}"  # noqa: E731
    keys = [(key, p) for key in ("ttft_s", "itl_s") for p in (50, 90, 99)]
    times = "".join(shown(told[key][f"p{p}"], 10 if p == 50 else 9) for key, p in keys)
    return (f"{result['policy']:12}{result['capacity']:>12,}{unit:2}{times}"
            f"{told['goodput_rps']:7.2f}/s {told['goodput_share']:4.0%}{told['token_hit_rate']:10.2%}"
            f"{told['preemptions']:11,}" + (f"  {told['refused']} refused" if told["refused"] else ""))
