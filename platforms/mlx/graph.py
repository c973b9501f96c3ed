"""How a step is launched: traced once per size, built lazily, dispatched when the step before it is done.

A launch builds the step's graph while the step before still runs, waits for that one, and dispatches. It waits, because
MLX writes into the K and V memory in place only when no running step holds it, and copies all of it otherwise.
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ...core.platform import Batch, Mask, Sampling, StepResult
from .attention import AttentionPlan, Sizes, plan_arrays
from .ops import Logits, Ops, State, Turns
from .quant import Device
from .sampling import Sampled, sample
from .worker import Line

MAX_TRACES = 256  # of one step; the one that rested longest goes first
MOVED = ("tokens", "positions", "slots", "logit_rows")  # parts of a batch that a trace reads


class Launched:
    """A step that waits, runs or is done."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.result: Future = Future()
        self.output: Sampled | mx.array | None = None

    def collect(self) -> StepResult | np.ndarray:
        if not self.result.done():
            self._line.post(self._line.settle)
        return self.result.result()

    def finish(self) -> None:
        """On the worker: wait, and move the result to the host."""
        try:
            output = self.output
            self.result.set_result(np.array(output) if isinstance(output, mx.array) else output.result())
        except Exception as error:  # the contract: what a step raised comes out of `collect`
            self.result.set_exception(error)
        self.output = None


class Trace:
    """`forward` over arrays only, for one set of sizes: compiled by MLX at its first call, or run eagerly.

    Weights are captured: they never change, a graph holds them without a copy, and so they are not listed in each call.
    State is passed in and given back.
    """

    def __init__(self, forward: Callable[..., Any], weights: Any, sizes: Sizes, page_size: int, turns: Turns,
                 device: Device, compiled: bool) -> None:
        self.forward, self.weights, self.sizes = forward, weights, sizes
        self.page_size, self.turns, self.device = page_size, turns, device
        self.samples = False  # known after the first call
        self.call = mx.compile(self._run) if compiled else self._run

    def _run(self, caches: list[mx.array], last: mx.array, fed: dict[str, mx.array]) -> list[Any]:
        """-> logits or another tensor, the token that each logit row follows, and the new caches."""
        tokens = mx.where(fed["tokens"] < 0, mx.take(last, fed["owners"]), fed["tokens"])
        batch = Batch(**{name: fed.get(name) for name in Batch._fields} | {"tokens": tokens, "sampling": Sampling()})
        plan = AttentionPlan(self.sizes, fed, self.page_size, self.device)
        ops = Ops(list(caches), batch, plan, self.turns)
        out = self.forward(ops, self.weights, batch)
        self.samples = isinstance(out, Logits)
        values = out.values if self.samples else out.astype(mx.float32)
        return [values, mx.take(tokens, batch.logit_rows), ops.caches]

    def drop(self) -> None:
        """Let go of the compiled graph, which refers to the trace in turn."""
        self.call = None


class Step:
    """One bucket's step. `compiled` = traces are compiled; otherwise each launch runs `forward` eagerly."""

    def __init__(self, forward: Callable[..., Any], weights: Any, line: Line, turns: Turns, device: Device,
                 compiled: bool, relieve: Callable[[], None], traced: Callable[[], None]) -> None:
        self.forward, self.weights, self.line, self.turns, self.device = forward, weights, line, turns, device
        self.compiled, self.relieve, self.traced = compiled, relieve, traced
        self.traces: OrderedDict[Any, Trace] = OrderedDict()
        line.own(self, partial(_drop, self.traces))

    def __call__(self, state: State, batch: Batch) -> tuple[Launched, State]:
        launched = Launched(self.line)
        self.line.post(self._launch, launched, state, batch)
        return launched, state

    def _launch(self, launched: Launched, state: State, batch: Batch) -> None:
        try:
            launched.output, arrays = self._build(state, batch)
            self.line.dispatch(launched, arrays)
        except Exception as error:  # the contract: what a step raised comes out of `collect`
            launched.result.set_exception(error)
        self.relieve()

    def _build(self, state: State, batch: Batch) -> tuple[Sampled | mx.array, list[mx.array]]:
        """The step's graph. The state gets the arrays that it will compute; it is unchanged when this raises."""
        sizes, host = plan_arrays(batch, state.spec.page_size)
        host |= {name: getattr(batch, name) for name in MOVED}
        host["owners"] = batch.seqs[batch.rows]
        if batch.adapters is not None:
            host["adapters"] = batch.adapters
        fed = {name: mx.array(value) for name, value in host.items()}
        trace = self._trace(sizes, state.spec.page_size, tuple(value.shape for value in host.values()))
        values, inputs, caches = trace.call(state.caches, state.last, fed)
        last = state.last
        if trace.samples:
            if batch.sampling.mask is not None:
                self._wait_for_mask(batch.sampling.mask, state, [values, *caches])
            output = sample(values, batch.targets, batch.sampling, inputs)
            # What is not sampled goes to slot 0, which is nobody's.
            slots = np.where(batch.targets == -1, host["owners"][batch.logit_rows], 0)
            last = last[:]
            last[mx.array(slots)] = output.tokens
            arrays = [output.tokens, *output.scores]
        else:
            output, arrays = values, [values]
        state.caches, state.last = caches, last
        return output, [*arrays, last, *caches]

    def _wait_for_mask(self, mask: Mask, state: State, arrays: list[mx.array]) -> None:
        """While the device computes what comes before sampling. The engine, whom this waits for, takes in the step
        before first, so that one's result is handed over now."""
        self.line.settle()
        state.caches = arrays[1:]  # whoever holds the old ones has them copied
        mx.async_eval(arrays)
        mask.ready()

    def _trace(self, *key: Any) -> Trace:
        trace = self.traces.get(key)
        if trace is None:
            sizes, page_size, _ = key
            trace = self.traces[key] = Trace(self.forward, self.weights, sizes, page_size, self.turns, self.device,
                                             self.compiled)
            self.traced()
            if len(self.traces) > MAX_TRACES:
                self.traces.popitem(last=False)[1].drop()
        self.traces.move_to_end(key)
        return trace


def _drop(traces: OrderedDict[Any, Trace]) -> None:
    for trace in traces.values():
        trace.drop()
    traces.clear()
