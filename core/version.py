"""Isthmus's own version."""
from __future__ import annotations


def isthmus_version() -> str:
    """The installed version; "unknown" when run from a folder that is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and no matter of --help
    try:
        return version(__package__.partition(".")[0])
    except PackageNotFoundError:
        return "unknown"
