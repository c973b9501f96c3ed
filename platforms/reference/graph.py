"""How a step is launched: eagerly. The work is done at launch, `collect` hands it over."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.platform import Batch, StepResult
from .ops import Ops, State


@dataclass(frozen=True)
class Finished:
    """A step that is done: its result, or the error that ended it."""

    result: StepResult | np.ndarray | None
    error: Exception | None = None

    def collect(self) -> StepResult | np.ndarray:
        if self.error is not None:
            raise self.error
        return self.result


@dataclass(frozen=True)
class EagerStep:
    """Runs `forward` on each call, at any size."""

    forward: Callable[[Ops, Any, Batch], Any]
    weights: Any

    def __call__(self, state: State, batch: Batch) -> tuple[Finished, State]:
        try:
            return Finished(self.forward(Ops(state, batch), self.weights, batch)), state
        except Exception as error:  # the contract: a step raises in `collect`, and the state stays usable
            return Finished(None, error), state
