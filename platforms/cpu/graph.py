"""How a step is launched: eagerly, on the platform's worker thread."""
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.platform import Batch, StepResult
from .ops import Ops, State


@dataclass(frozen=True)
class Launched:
    """A step that waits, runs or is done."""

    future: Future

    def collect(self) -> StepResult | np.ndarray:
        return self.future.result()


@dataclass(frozen=True)
class EagerStep:
    """Runs `forward` at any size, after the steps that were launched before."""

    forward: Callable[[Ops, Any, Batch], Any]
    weights: Any
    worker: ThreadPoolExecutor
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __call__(self, state: State, batch: Batch) -> tuple[Launched, State]:
        return Launched(self.worker.submit(self._run, state, batch)), state

    def _run(self, state: State, batch: Batch) -> StepResult | np.ndarray:
        with torch.inference_mode():
            ops = Ops(state, batch, self.reduce)
            result = self.forward(ops, self.weights, ops.batch)
            return result.float().numpy() if isinstance(result, torch.Tensor) else result
