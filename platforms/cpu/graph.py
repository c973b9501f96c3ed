"""How a step is launched: on the platform's worker thread, by compiled kernels or eagerly."""
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.platform import Batch, StepResult
from .compiled.step import Compiled, cache_records
from .ops import Ops, State, finish


@dataclass(frozen=True)
class Launched:
    """A step that waits, runs or is done."""

    future: Future

    def collect(self) -> StepResult | np.ndarray:
        return self.future.result()


@dataclass
class Step:
    """Runs `forward` at any size, after the steps that were launched before. compiled: its programs, None = eagerly."""

    forward: Callable[[Ops, Any, Batch], Any]
    weights: Any
    worker: ThreadPoolExecutor
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
    compiled: Compiled | None = None
    known: tuple[State, np.ndarray | None] | None = None  # the last state, and where its K and V lie

    def __call__(self, state: State, batch: Batch) -> tuple[Launched, State]:
        return Launched(self.worker.submit(self._run, state, batch)), state

    def _run(self, state: State, batch: Batch) -> StepResult | np.ndarray:
        with torch.inference_mode():
            layers = self._layers(state)
            program = None if layers is None else self.compiled.program(len(batch.tokens), len(batch.logit_rows))
            if program is None:
                ops = Ops(state, batch, self.reduce)
                result = self.forward(ops, self.weights, ops.batch)
                return result.float().numpy() if isinstance(result, torch.Tensor) else result
            tokens = batch.tokens
            if (tokens < 0).any():
                tokens = np.where(tokens < 0, state.last.numpy()[batch.seqs[batch.rows]], tokens)
            logits = self.compiled.runner.run(program, layers, state.spec.page_size, batch, tokens)
            if not program.tape.sampled:
                return logits.copy()
            return finish(state, batch, tokens[batch.logit_rows], torch.from_numpy(logits), program.tape.softcap)

    def _layers(self, state: State) -> np.ndarray | None:
        if self.compiled is None:
            return None
        if self.known is None or self.known[0] is not state:
            self.known = state, cache_records(state.layers)
            if self.known[1] is None:
                self.compiled.tell(f"K and V in {state.spec.dtype}")
        return self.known[1]
