"""Isthmus: `Engine` runs a model in this process, `python -m isthmus` is the command line.

What is named here is imported when it is first used, so that nothing else waits for it.
"""
from __future__ import annotations

TYPE_CHECKING = False  # `typing` is not imported either: it takes longer than all else that `isthmus --help` does first
if TYPE_CHECKING:
    from typing import Any

    from .core.api import Completion, Engine, TokenLogprobs

__version__: str
__all__ = ["Completion", "Engine", "TokenLogprobs", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from .core.version import isthmus_version
        return isthmus_version()
    if name in __all__:
        from .core import api
        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
