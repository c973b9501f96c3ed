"""`isthmus bench batch`: one batch on a platform, in this process, beside the least time that it could take."""
from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from ..settings import Resolved
from .bench_load import numbers
from .bench_server import add_result_arguments, check_result_files, give, watched
from .parser import add_model_argument

MAX_ROWS, MAX_CONTEXT, MAX_STEPS = 8192, 10_000_000, 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    group = parser.add_argument_group("what is measured")
    group.add_argument("--rows", default="1,8", metavar="LIST", help="requests in a batch [1,8]")
    group.add_argument("--context", default="512", metavar="LIST", help="tokens behind a decode step [512]")
    group.add_argument("--prefill", default="512", metavar="LIST", help="prompt tokens computed in one step [512]")
    group.add_argument("--steps", type=int, metavar="N", help="timed of each [as many as half a second has]")
    group.add_argument("--bandwidth", type=float, metavar="GB/S", help="of memory, where it is known; else measured")
    group.add_argument("--products", type=float, metavar="TFLOP/S", help="of matrix products; else measured")
    add_result_arguments(parser)


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    """Measure every decode and prefill that was asked for."""
    rows, contexts, prefills = (
        [int(n) for n in numbers(name, text, 1, most, whole=True)]
        for name, text, most in (("--rows", arguments.rows, MAX_ROWS), ("--context", arguments.context, MAX_CONTEXT),
                                 ("--prefill", arguments.prefill, MAX_CONTEXT)))
    for name in ("bandwidth", "products"):
        if (value := getattr(arguments, name)) is not None and not 0 < value < 1e9:
            raise ConfigError(f"--{name} {value:g}: it must be above 0")
    if arguments.steps is not None and not 2 <= arguments.steps <= MAX_STEPS:
        raise ConfigError(f"--steps {arguments.steps}: it must be between 2 and {MAX_STEPS}")
    check_result_files(arguments)
    with watched() as line:
        result, told = _measure(arguments, resolved, [(r, 1, c) for c in contexts for r in rows]
                                + [(1, p, p) for p in prefills], line)
    give(result, told, arguments)
    return 0


def _measure(arguments: argparse.Namespace, resolved: Resolved, cases: list[tuple[int, int, int]],
             line: Callable[..., None]) -> tuple[Any, list[str]]:
    from ..bench import batch, ceilings
    from ..bench.picture import table_of, text_of
    from ..bench.result import Result, shown_figure
    from ..bench.steps import Place
    from ..platform import Unsupported
    from ..startup import load
    loaded = load(resolved.config, line)
    try:
        line("measure memory and products")
        roof = ceilings.measure(Place(loaded.platform, loaded.manifest, loaded.dtype), loaded.model.nbytes)
        how, given = dict(roof.how), (arguments.bandwidth, arguments.products)
        roof = ceilings.Ceilings(given[0] * 1e9 if given[0] else roof.bytes_per_s,
                                 given[1] * 1e12 if given[1] else roof.operations_per_s,
                                 {key: "given" if value else how[key] for key, value in
                                  zip(("bytes", "operations"), given, strict=True)})
        runs, notes = [], []
        for rows, tokens, context in cases:
            line(f"{rows} rows, {tokens} of {context} tokens")
            try:
                runs.append(batch.measure(loaded, roof, rows, tokens, context, arguments.steps))
            except (Unsupported, MemoryError) as error:
                notes.append(f"not measured: {error}")
    finally:
        getattr(loaded.platform, "close", lambda: None)()
    if not runs:
        raise ConfigError("; ".join(notes))
    if any(run.figures["roof_share"] > 1 for run in runs):
        notes.append("a step did better than the roof: the memory or products that were measured are not all there is; "
                     "measure on a quiet machine, or give --bandwidth and --products")
    subject = {"model": loaded.model.config.name, "platform": loaded.manifest.name, "device": loaded.manifest.device,
               "dtype": loaded.dtype, "weight_bytes": loaded.model.nbytes, "report": list(loaded.model.report)}
    about = {"rows": arguments.rows, "context": arguments.context, "prefill": arguments.prefill,
             "bytes_per_s": roof.bytes_per_s, "operations_per_s": roof.operations_per_s, "how": roof.how}
    told = [f"{subject['model']} on {subject['platform']} ({subject['device']}), {subject['dtype']}, weights "
            f"{shown_figure('resident_bytes', loaded.model.nbytes)}",
            f"memory {roof.bytes_per_s / 1e9:,.1f} GB/s ({roof.how['bytes']})",
            f"products {roof.operations_per_s / 1e12:,.3f} TFLOP/s ({roof.how['operations']})",
            *text_of(table_of(runs, ("ms", "tokens_per_s", "gb_per_s", "tflop_per_s", "roof_share")))]
    told += [f"  {run.label}: bound by {run.detail['bound']}, at least {run.detail['least_ms']:.2f} ms; spread "
             f"{run.detail['spread']:.0%} of {run.detail['steps']} steps" for run in runs]
    return Result("batch", subject, about, runs, notes), told + [f"note: {note}" for note in notes]
