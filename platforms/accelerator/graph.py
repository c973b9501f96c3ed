"""Graphs: a decode step as one graph, a small prefill as graphs with attention between them.

A graph is captured on a thread of its own while steps are launched eagerly, from a batch of padding alone, which
touches nothing but page 0 and sequence slot 0. It holds for the state that it was captured with.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ref

import numpy as np
import torch

from ...core.platform import Batch, Bucket, Sampling
from .attention import Backend, View
from .device import Device
from .state import State

PIECEWISE_TOKENS = 1024  # tokens of a prefill up to which launching takes longer than computing
WARM_UPS = 2             # eager runs before a capture: libraries set themselves up in them


class Graph(Protocol):
    """As `torch.accelerator.Graph`."""

    def capture_begin(self) -> None:
        ...

    def capture_end(self) -> None:
        ...

    def replay(self) -> None:
        ...


def accelerator_graph(device: Device) -> Callable[[], Graph] | str:
    """Makes graphs that share one pool of memory, or why there are none."""
    make = getattr(torch.accelerator, "Graph", None)
    if device.host or make is None:
        return "the host's processor has no graphs" if device.host else f"torch {torch.__version__} has no graphs here"
    pool: list[Any] = []

    def new() -> Graph:
        graph = make(pool=pool[0] if pool else None, capture_error_mode="thread_local")
        if not pool:
            pool.append(graph.pool())
        return graph
    return new


@dataclass
class Pieces:
    """A captured step: graphs, and calls that are made between them. It is replayed in the order of capture."""

    make: Callable[[], Graph]
    parts: list[Callable[[], None]] = field(default_factory=list)
    open: Graph | None = None

    def begin(self) -> None:
        self.open = self.make()
        self.open.capture_begin()

    def end(self) -> None:
        graph, self.open = self.open, None
        graph.capture_end()
        self.parts.append(graph.replay)

    def between(self, call: Callable[[], None]) -> None:
        """Make `call` now and at each replay, outside of the graphs."""
        self.end()
        call()
        self.parts.append(call)
        self.begin()

    def give_up(self) -> None:
        """After an error: leave no capture open."""
        if self.open is not None:
            try:
                self.open.capture_end()
            except RuntimeError:  # the capture is invalid already
                pass
            self.open = None

    def replay(self) -> None:
        for part in self.parts:
            part()


@dataclass
class Captured:
    """A step that can be replayed: what it reads, and what it leaves in `output` and `inputs`. It holds for one state,
    and does not keep that alive."""

    state: ref[State]
    buffer: torch.Tensor
    view: View
    pieces: Pieces
    output: Any
    inputs: torch.Tensor
    backends: tuple[Backend, ...] = ()  # that a whole graph holds

    def replay(self, host: Batch) -> tuple[Any, torch.Tensor]:
        self.view.host = host
        for backend in self.backends:
            backend.prepare(self.view)
        self.pieces.replay()
        return self.output, self.inputs


def idle_batch(bucket: Bucket, adapted: bool = False) -> Batch:
    """Padding alone: every array of the bucket's sizes, token i of row i, or of the last row. adapted: with adapters,
    that is with none."""
    tokens, rows, logits = bucket.tokens, bucket.rows, bucket.logits
    zeros = {name: np.zeros(size, np.int32) for name, size in (
        ("tokens", tokens), ("positions", tokens), ("slots", tokens), ("seqs", rows), ("starts", rows + 1),
        ("lengths", rows), ("logit_rows", logits))}
    return Batch(**zeros, rows=np.minimum(np.arange(tokens, dtype=np.int32), rows - 1),
                 pages=np.zeros((rows, bucket.pages), np.int32), targets=np.full(logits, -2, np.int32),
                 sampling=Sampling(), adapters=zeros["tokens"] if adapted else None)


def capture(make: Callable[[], Graph], device: Device, run: Callable[[View, Any], tuple[Any, torch.Tensor]],
            state: State, view: View, buffer: torch.Tensor, whole: tuple[Backend, ...] | None) -> Captured:
    """Capture `run(view, pieces)` on a stream of its own. whole: as one graph with what these backends do in it; None =
    with attention between graphs.

    Raises what `run` raises, and `RuntimeError` for what a graph cannot hold, such as waiting for the device.
    """
    pieces = Pieces(make)
    with torch.inference_mode(), (torch.Stream(device.torch) if not device.host else torch.inference_mode()):
        for _ in range(0 if device.host else WARM_UPS):
            run(view, None)
        view.whole = whole is not None
        for backend in whole or ():
            backend.prepare(view)
        device.wait()
        pieces.begin()
        try:
            output, inputs = run(view, None if view.whole else pieces)
            pieces.end()
        except BaseException:
            pieces.give_up()
            raise
    return Captured(ref(state), buffer, view, pieces, output, inputs, whole or ())


def fits(captured: Captured | None, state: State, fed_bytes: int) -> bool:
    return captured is not None and captured.state() is state and len(captured.buffer) == fed_bytes


def reason_against_graph(bucket: Bucket | None, decode: bool) -> str | None:
    """Why a step of this size is launched eagerly for good."""
    if bucket is None:
        return "its size is not fixed"
    if not decode and bucket.tokens > PIECEWISE_TOKENS:
        return f"{bucket.tokens} tokens take longer to compute than to launch"
    return None
