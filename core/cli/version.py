"""`isthmus version`."""
from __future__ import annotations

import argparse
import platform
from typing import Any

from ..version import isthmus_version


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(arguments: argparse.Namespace, resolved: Any) -> int:
    print(f"isthmus {isthmus_version()} on Python {platform.python_version()}, {platform.platform()}")
    return 0
