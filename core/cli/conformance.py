"""`isthmus conformance`: hold a platform to the laws of the design, op by op and law by law."""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import ConfigError
from ..settings import Resolved

MAX_SECONDS = 24 * 3600  # of one case


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", default=[], metavar="LAW|OP|PATTERN",
                        help="a law, an op, or a pattern of case ids with * and ?; may be repeated")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random inputs [0]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the report as Markdown")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS",
                        help="for one case; the run ends at one that takes longer [300]")
    parser.add_argument("--verbose", action="store_true",
                        help="print each case's name before it is run, then its outcome and seconds")
    parser.add_argument("--list", action="store_true", help="print the cases and what they need, and run none")


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    """0 when nothing is wrong or unexpected, 1 when something is, 2 when the platform cannot be held to the laws."""
    from ...conformance import all_cases
    from ...conformance.apart import Order, run_apart
    from ...conformance.terminal import list_cases
    from ..platform_options import platform_options
    _check(arguments)
    try:
        cases = all_cases(arguments.only)
    except ValueError as error:  # a pattern that no case has
        raise ConfigError(str(error)) from error
    if arguments.list:
        list_cases(cases)
        return 0
    settings = resolved.config.platform
    report, table = (str(file.absolute()) if file else None for file in (arguments.json, arguments.markdown))
    return run_apart(Order(settings.platform, platform_options(settings.platform_option), arguments.only,
                           arguments.seed, arguments.timeout, arguments.verbose, report, table, sys.path))


def _check(arguments: argparse.Namespace) -> None:
    files = [file for file in (arguments.json, arguments.markdown) if file]
    for file in files:
        if arguments.list:
            raise ConfigError(f"{file}: --list runs nothing, so there is no report to write")
        if file.is_dir():
            raise ConfigError(f"{file} is a folder: name a file for the report")
        if not file.absolute().parent.is_dir():
            raise ConfigError(f"{file}: there is no such folder")
    if len({file.absolute() for file in files}) < len(files):
        raise ConfigError(f"--json and --markdown both name {files[0]}: give each a file of its own")
    if arguments.seed < 0:
        raise ConfigError(f"--seed {arguments.seed} is below 0")
    if not 0 < arguments.timeout <= MAX_SECONDS:
        raise ConfigError(f"--timeout {arguments.timeout:g}: more than 0 seconds are needed, at most {MAX_SECONDS}")
