"""`isthmus rerun`: run a step recording again, without its model and its hardware."""
from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import ConfigError

SHOWN = ("running", "waiting", "pages_total", "pages_free", "pages_cached", "pages_used", "pages_quarantined",
         "preemptions", "evicted_pages", "generated_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE", help="what `isthmus serve --record FILE` wrote")
    parser.add_argument("--until", type=int, metavar="STEP", help="stop when this step is launched, and tell the state")
    parser.add_argument("--verify", action="store_true", help="prove the ledger of pages after every step (slow)")
    parser.add_argument("--bisect", action="store_true", help="find the first step after which the ledger is broken")
    parser.add_argument("--against", type=Path, metavar="OTHER",
                        help="compare with another recording instead: the first entry that differs, times apart")
    parser.add_argument("--fast", action="store_true", help="the null platform takes the batches unchecked")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, resolved: Any) -> int:
    """0 when all is as recorded, 1 when something differs or is broken; the first such thing is told."""
    from ..recording.rerun import against, bisect, rerun
    if arguments.file is None:
        raise ConfigError("which recording? `isthmus rerun FILE` takes what `isthmus serve --record FILE` wrote")
    if arguments.until is not None and arguments.until < 1:
        raise ConfigError(f"--until {arguments.until}: steps count from 1")
    if arguments.bisect and (arguments.against or arguments.until or arguments.verify):
        raise ConfigError("--bisect goes through the whole recording by itself: leave --against, --until and --verify "
                          "out")
    if arguments.against and (arguments.until or arguments.verify or arguments.fast):
        raise ConfigError("--against compares two files and runs none: leave --until, --verify and --fast out")
    if arguments.against:
        outcome = against(arguments.file, arguments.against)
    elif arguments.bisect:
        outcome = bisect(arguments.file, not arguments.fast)
    else:
        outcome = rerun(arguments.file, arguments.until, not arguments.fast, lambda step: arguments.verify)
    if arguments.until and outcome.steps < arguments.until and not outcome.broken:
        raise ConfigError(f"--until {arguments.until}: {arguments.file} ends at step {outcome.steps}")
    if arguments.json:
        print(json.dumps(asdict(outcome)))
    else:
        print(_text(outcome, "no difference" if arguments.against else "as recorded"))
    return 1 if outcome.broken else 0


def _text(outcome: Any, good: str) -> str:
    first = f"step {outcome.step}: {outcome.broken}" if outcome.broken else (
        f"{good}: {outcome.steps} steps, {outcome.entries} entries"
        + (", the last one cut off when the process ended" if outcome.cut else "")
        + (f"; the ledger of pages held, proved after {outcome.proved} steps" if outcome.proved else ""))
    stats = outcome.stats or {}
    return "\n".join([first, *(f"  {name:20} {stats[name]}" for name in SHOWN if name in stats)])
