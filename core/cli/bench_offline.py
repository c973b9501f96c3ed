"""`isthmus bench offline`: a whole list of prompts through the engine in this process."""
from __future__ import annotations

import argparse

import psutil

from ..errors import ConfigError
from ..settings import Resolved
from .bench_load import add_workload_arguments, check_workload, make_workload
from .bench_server import add_result_arguments, check_result_files, give, watched
from .parser import add_model_argument

FAILED, MAX_REPEAT = 1, 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--repeat", type=int, default=1, metavar="N",
                        help="so often, each time with other prompts and an empty cache, for `bench compare` [1]")
    add_result_arguments(parser)
    add_workload_arguments(parser)


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    """0 when every prompt was answered, else 1."""
    check_workload(arguments)
    if arguments.turns > 1:
        raise ConfigError("--turns: later turns need the answers before them, which `isthmus bench serving` has")
    if not 1 <= arguments.repeat <= MAX_REPEAT:
        raise ConfigError(f"--repeat {arguments.repeat}: it must be between 1 and {MAX_REPEAT}")
    check_result_files(arguments)
    from ..api import Engine
    from ..bench import offline
    from ..bench.picture import table_of, text_of
    from ..bench.result import Result, Run, shown_figure
    from ..settings import list_settings, value_of
    runs, workload = [], None
    given = {name: value_of(resolved.config, list_settings()[name]) for name, origin in resolved.origin.items()
             if origin != "default" and name != "model"}
    with watched() as line, Engine(resolved.config.model.model, progress=line, **given) as engine:
        info = engine.info
        line("warm up")
        offline.warm_up(engine, info.vocab_size)
        for number in range(arguments.repeat):
            workload = make_workload(arguments, info.vocab_size, more_seed=number)
            engine.core.command("flush_cache")
            recorder = offline.run(engine, workload, {}, lambda done, total: line("run prompts", done, total))
            figures = recorder.figures() | {"resident_bytes": psutil.Process().memory_info().rss}
            runs.append(Run("all at once", figures, {**recorder.detail(), "steps": engine.core.steps}))
    subject = {"model": info.model, "platform": info.platform, "device": info.device, "dtype": info.dtype,
               "weight_bytes": info.weight_bytes, "kv_bytes": info.kv_bytes, "max_running": info.max_running}
    about = {"workload": workload.name, **workload.facts, "repeat": arguments.repeat, "settings": {
        name: value for name, value in given.items() if not name.endswith("api_key")}}
    told = [f"{workload.name}, {workload.requests} prompts on {info.model}, {info.platform} ({info.device}), "
            f"{info.dtype}; memory {shown_figure('resident_bytes', runs[-1].figures['resident_bytes'])}",
            *text_of(table_of(runs, ("output_tokens_per_s", "prompt_tokens_per_s", "requests_per_s", "hit_rate",
                                     "seconds", "failed")))]
    for run in runs:
        told += [f"  {count} failed: {'; '.join(run.detail['error_examples'][kind])}"
                 for kind, count in run.detail["errors"].items()]
    give(Result("offline", subject, about, runs), told, arguments)
    return FAILED if any(run.figures["failed"] for run in runs) else 0
