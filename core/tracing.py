"""ISTHMUS_DEBUG=4: every op of a step with its shapes, for any platform."""
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class TracedOps:
    """Passes each call on to a platform's Ops and logs its name, the shapes that went in and the one that came out."""

    def __init__(self, ops: Any):
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)
        if not callable(op):
            return op

        def traced(*args: Any, **kwargs: Any) -> Any:
            result = op(*args, **kwargs)
            log.info("%s(%s) -> %s", name, ", ".join(map(_describe, [*args, *kwargs.values()])), _describe(result))
            return result
        return traced


def traced_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same forward over `TracedOps`."""
    return lambda ops, weights, batch: forward(TracedOps(ops), weights, batch)


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return str(list(shape)) if shape is not None else type(value).__name__
