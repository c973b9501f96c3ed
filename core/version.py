"""Isthmus's own version."""
from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def isthmus_version() -> str:
    """The installed version; "unknown" when run from a folder that is not installed."""
    try:
        return version(__package__.partition(".")[0])
    except PackageNotFoundError:
        return "unknown"
