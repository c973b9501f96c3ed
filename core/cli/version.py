"""`isthmus version`."""
from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def isthmus_version() -> str:
    """The installed version; "unknown" when run from a folder that is not installed."""
    try:
        return version(__package__.partition(".")[0])
    except PackageNotFoundError:
        return "unknown"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(arguments: argparse.Namespace, resolved: Any) -> int:
    print(f"isthmus {isthmus_version()} on Python {platform.python_version()}, {platform.platform()}")
    return 0
