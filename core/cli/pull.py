"""`isthmus pull`: download a model."""
from __future__ import annotations

import argparse
from typing import Any

from .progress import ProgressLine
from .session import find


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a name of `isthmus models`, or a hub id owner/name; "
                        "the default model unless given")
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a hub model")


def run(arguments: argparse.Namespace, resolved: Any) -> int:
    with ProgressLine() as line:
        path = find(arguments.model, arguments.revision, line)
    print(path)
    return 0
