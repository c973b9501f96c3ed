"""`isthmus conformance`: hold a platform to the laws of the design, op by op and law by law."""
from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from ..errors import ConfigError
from ..logs import announce
from ..registry import RegistrationError
from .settings import Resolved


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", default=[], metavar="LAW|OP|PATTERN",
                        help="a law, an op, or a shell pattern of case ids; may be repeated")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random inputs [0]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the report as Markdown")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS",
                        help="for one case; the run ends at one that takes longer [300]")
    parser.add_argument("--verbose", action="store_true", help="print each case's name before it is run")
    parser.add_argument("--list", action="store_true", help="print the cases and what they need, and run none")


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    """0 when nothing is wrong or unexpected, 1 when something is, 2 when the platform cannot be held to the laws."""
    from ...conformance import Outcome, Refused, all_cases, run_suite
    from ...conformance.terminal import ProgressBar, list_cases, show
    from ...conformance.watch import report_crashes
    from ..discovery import choose_platform
    from ..startup import platform_options
    for file in filter(None, (arguments.json, arguments.markdown)):
        if not file.absolute().parent.is_dir():
            raise ConfigError(f"{file}: there is no such folder")
    if arguments.seed < 0:
        raise ConfigError(f"--seed {arguments.seed} is below 0")
    if not arguments.timeout > 0:
        raise ConfigError(f"--timeout {arguments.timeout:g}: more than 0 seconds are needed")
    try:
        if arguments.list:
            list_cases(all_cases(arguments.only))
            return 0
        settings = resolved.config.platform
        options = platform_options(settings.platform_option)
        name = choose_platform(options)[0] if settings.platform == "auto" else settings.platform
        report_crashes()
        with ProgressBar(arguments.verbose) as progress:
            report = run_suite(name, options, only=arguments.only, seed=arguments.seed, progress=progress,
                               limit=arguments.timeout)
    except RegistrationError as error:  # the platform's own mistake, which is no reason to be let off
        announce(f"isthmus: {error}", logging.ERROR)
        return 1
    except (Refused, ValueError) as error:
        raise ConfigError(str(error)) from error
    if arguments.json:
        arguments.json.write_text(report.as_json(), "utf-8")
    if arguments.markdown:
        arguments.markdown.write_text(report.as_markdown(), "utf-8")
    show(report)
    if report.late:  # threads of the platform may never end, and Python would wait for them
        sys.stdout.flush()
        os._exit(1)
    if report.counts()[Outcome.UNAVAILABLE]:
        return 2
    return 0 if report.ok else 1
