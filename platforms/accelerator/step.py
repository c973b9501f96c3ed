"""One compiled step: pack and move the integers, launch eagerly or replay a graph, sample, move the result."""
from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet, ref

import numpy as np
import torch

from ...core.platform import Batch, Bucket, Sampling, StepResult
from .attention import Backend, View, only_decodes
from .device import Device
from .graph import Captured, Graph, capture, fits, idle_batch, reason_against_graph
from .kernels import Kernels
from .ops import Logits, Ops, plain
from .sampling import host_result
from .staging import Staging, layout
from .state import State

log = logging.getLogger(__name__)

MOVED = ("tokens", "positions", "slots", "rows", "starts", "lengths", "pages", "logit_rows")


@dataclass
class Runtime:
    """What the steps of a platform share.

    graph: makes graphs, or says why there are none. background: where graphs are captured; None = at once, by the step
    that would need one. captured: told of each step that a graph is made of, or will be. launches: how many of a
    bucket before it is captured.
    reduce: sum over the ranks.
    """

    device: Device
    kernels: Kernels
    staging: Staging
    graph: Callable[[], Graph] | str
    background: ThreadPoolExecutor | None
    captured: Callable[[], None]
    launches: int = 1
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
    steps: WeakSet[Step] = field(default_factory=WeakSet)


class Launched:
    """A step that runs or is done; its result is on its way to the host."""

    def __init__(self, device: Device) -> None:
        self.event, self.error = device.event(), None
        self.parts: list[torch.Tensor] = []
        self.sampled = True

    def collect(self) -> StepResult | np.ndarray:
        if self.error is not None:
            raise self.error
        self.event.synchronize()
        parts = [part.numpy().copy() for part in self.parts]
        return host_result(parts) if self.sampled else parts[0]

    def bring(self, parts: list[torch.Tensor], device: Device) -> None:
        """Copy to the host, behind what was launched."""
        for part in parts:
            host = torch.empty(part.shape, dtype=part.dtype, pin_memory=not device.host)
            self.parts.append(host.copy_(part, non_blocking=True))
        self.event.record()


class Step:
    """One bucket's step; `None` = any size, always launched eagerly."""

    def __init__(self, runtime: Runtime, forward: Callable[[Ops, Any, Batch], Any], weights: Any,
                 bucket: Bucket | None) -> None:
        self.runtime, self.forward, self.weights, self.bucket = runtime, forward, weights, bucket
        self.wanted: dict[bool, dict[str, Backend]] = {True: {}, False: {}}  # arrays, by whether every row is a decode
        self.used: set[Backend] = set()
        self.graphs: dict[bool, Captured] = {}      # by whether every row is a decode
        self.launches: dict[bool, tuple[ref[State], int]] = {}  # of a state, until it is captured or given up
        runtime.steps.add(self)

    def forget(self) -> None:
        """Let graphs of states go that are no more, and the memory that they read."""
        self.graphs = {kind: graph for kind, graph in self.graphs.items() if graph.state() is not None}

    def __call__(self, state: State, batch: Batch) -> tuple[Launched, State]:
        launched = Launched(self.runtime.device)
        try:
            with torch.inference_mode():
                self._launch(launched, state, batch)
        except Exception as error:  # the contract: what a step raised comes out of `collect`
            launched.error = error
        return launched, state

    def _launch(self, launched: Launched, state: State, batch: Batch) -> None:
        runtime, view = self.runtime, View(batch, {}, self.bucket, state.spec.page_size, only_decodes(batch))
        host = self._host_arrays(view)
        captured = self.graphs.get(view.decode)
        if fits(captured, state, layout(host)[1]):
            runtime.staging.feed(host, captured.buffer)
            output, inputs = captured.replay(batch)
            owners = captured.view.fed["owners"]
        else:
            view.fed = runtime.staging.feed(host)
            output, inputs = self._run(state, view, None)
            owners = view.fed["owners"]
            self._consider(state, view.decode, batch.adapters is not None)
        if isinstance(output, Logits):
            self._sample(launched, state, batch, output.values, inputs, owners)
        else:
            launched.sampled = False
            launched.bring([output.float()], runtime.device)

    def _host_arrays(self, view: View) -> dict[str, np.ndarray]:
        batch = view.host
        host = {name: getattr(batch, name) for name in MOVED}
        host["owners"] = batch.seqs[batch.rows]
        if batch.adapters is not None:
            host["adapters"] = batch.adapters
        return host | {name: backend.plan(view, name) for name, backend in self.wanted[view.decode].items()}

    def _run(self, state: State, view: View, pieces: Any) -> tuple[Any, torch.Tensor]:
        """The forward over what was fed -> its output, and the token that each logit row follows."""
        fed = view.fed
        tokens = torch.where(fed["tokens"] < 0, state.last[fed["owners"]], fed["tokens"])
        batch = Batch(**{name: fed.get(name) for name in Batch._fields} | {"tokens": tokens, "sampling": Sampling()})

        def need(backend: Backend, names: tuple[str, ...]) -> None:
            self.used.add(backend)
            missing = [name for name in names if name not in view.fed]
            if missing:  # once: later steps feed them with the rest
                self.wanted[view.decode] |= dict.fromkeys(missing, backend)
                view.fed |= self.runtime.staging.feed({name: backend.plan(view, name) for name in missing})

        ops = Ops(state, batch, view, self.runtime.kernels, need, self.runtime.reduce, pieces)
        output = plain(self.forward(ops, self.weights, batch))
        return output, tokens[fed["logit_rows"]]

    def _sample(self, launched: Launched, state: State, batch: Batch, logits: torch.Tensor, inputs: torch.Tensor,
                owners: torch.Tensor) -> None:
        runtime, sampling = self.runtime, batch.sampling
        if sampling.mask is not None:
            sampling.mask.ready()  # while the device computes the logits
        host = runtime.kernels.sampling_arrays(sampling, batch.targets)
        fed = runtime.staging.feed(host | {"rows": batch.logit_rows})
        top = None if sampling.top_logprobs is None else len(sampling.top_logprobs)
        sampled = runtime.kernels.sample(logits, fed, inputs, top, bool((batch.targets != -1).any()))
        # What is not sampled goes to slot 0, which is nobody's.
        slots = torch.where(fed["targets"] == -1, owners[fed["rows"]], 0)
        state.last.scatter_(0, slots.long(), sampled.tokens)
        launched.bring([sampled.tokens, *sampled.scores], runtime.device)

    # ---- graphs

    def _consider(self, state: State, decode: bool, adapted: bool) -> None:
        """Have a graph captured, once for a state, now or in the background. adapted: its batches name adapters."""
        before, launches = self.launches.get(decode, (None, 0))
        launches = launches + 1 if before is not None and before() is state else 1
        self.launches[decode] = ref(state), launches
        if isinstance(self.runtime.graph, str) or reason_against_graph(self.bucket, decode):
            return
        if launches == 1:
            self.runtime.captured()
        if launches != self.runtime.launches:
            return
        self.graphs.pop(decode, None)
        if self.runtime.background is None:
            self._capture(state, decode, adapted)
        else:
            self.runtime.background.submit(self._capture, state, decode, adapted)

    def _capture(self, state: State, decode: bool, adapted: bool) -> None:
        runtime, bucket = self.runtime, self.bucket
        view = View(idle_batch(bucket, adapted), {}, bucket, state.spec.page_size, decode)
        used = tuple(self.used)
        whole = used if decode and all(b.whole(bucket, view.page_size) is None for b in used) else None
        try:
            with torch.inference_mode():
                host = self._host_arrays(view)
                buffer = torch.empty(layout(host)[1], dtype=torch.uint8, device=runtime.device.torch)
                view.fed = Staging(runtime.device).feed(host, buffer)
                runtime.device.wait()
            self.graphs[decode] = capture(runtime.graph, runtime.device, lambda v, p: self._run(state, v, p), state,
                                          view, buffer, whole)
        except Exception as error:  # eager serves; a graph is a gain, not a need
            log.warning("no graph for %s: %s", bucket, error)
