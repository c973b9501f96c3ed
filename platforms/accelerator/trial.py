"""Trials of a vendor's operators: one serves in the place of ours where, on this very device, it gave our numbers.

A trial is made once for each operator, kind and shape of weight, while weights are loaded, at the numbers of tokens
that steps have: with rows of zeros, of large and of tiny numbers, and rows of padding that are no numbers. The operator
is captured in a graph too, since decode steps are replayed, and timed where the device has graphs. Whatever it raises
is a reason to leave it.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .device import Device
from .graph import Graph

log = logging.getLogger(__name__)

COMPARED = 96   # rows of a result that are looked at, the last among them
CALLS = 8       # in a graph that is timed
ROUNDS = 3      # of which the shortest counts

Call = Callable[..., torch.Tensor]


class Inputs(NamedTuple):
    """What a call gets, its tokens along axis 0; live: bool [T], the rows whose results count."""

    tensors: tuple[torch.Tensor, ...]
    live: torch.Tensor


@dataclass(frozen=True)
class Verdict:
    """right: numbers of tokens at which its numbers were ours, if they nowhere were others. faster: those at which it
    took no longer. ratio: the mean of its time over ours, 1 where nothing was timed. reason: the first against it."""

    right: frozenset[int] = frozenset()
    faster: frozenset[int] = frozenset()
    ratio: float = 1.0
    reason: str | None = None

    @property
    def everywhere(self) -> bool:
        """Whether it may replace ours altogether: right at every number of tokens, and no slower on the whole."""
        return self.reason is None and self.ratio <= 1


def activations(tokens: int, width: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Inputs:
    """[tokens, width] as a model may have them: among many plain rows one of zeros, one with an outlier, one of large
    and one of tiny numbers; the last row is padding, and no number."""
    random = torch.Generator(device).manual_seed(seed + tokens)
    x = torch.randn(tokens, width, generator=random, device=device)
    live = torch.ones(tokens, dtype=torch.bool, device=device)
    if tokens >= 6:
        x[0], x[1] = 0, x[1] * 30
        x[2, width // 3], x[3] = 300, x[3] * 1e-4
        x[-1], live[-1] = torch.nan, False
    return Inputs((x.to(dtype),), live)


def difference(got: torch.Tensor, want: torch.Tensor, live: torch.Tensor, limit: float) -> str | None:
    """Why [T, ..] are not the numbers wanted; None = each live row has a normalised mean squared error of at most
    `limit`, and rows of zeros are zeros."""
    if not isinstance(got, torch.Tensor) or got.shape != want.shape or got.dtype != want.dtype:
        about = f"{got.dtype} {list(got.shape)}" if isinstance(got, torch.Tensor) else type(got).__name__
        return f"gives {about} in the place of {want.dtype} {list(want.shape)}"
    rows = live.nonzero()[:, 0]
    if len(rows) > COMPARED:
        rows = rows[torch.linspace(0, len(rows) - 1, COMPARED, device=rows.device).long()]
    got, want = (part[rows].flatten(1).double() for part in (got, want))
    size = want.square().sum(-1)
    error = (got - want).square().sum(-1) / torch.where(size > 0, size, 1)
    bad = ~(error <= torch.where(size > 0, limit, 0.0))  # a NaN is bad
    if not bool(bad.any()):
        return None
    row = int(bad.nonzero()[0, 0])
    return (f"row {int(rows[row])} of {len(live)} differs by an NMSE of {float(error[row]):.2g}, {int(bad.sum())} of "
            f"{len(rows)} by more than {limit:g}")


class Trials:
    """Verdicts by key. sizes: the numbers of tokens that steps have. graphs: gives what makes graphs that share memory,
    or says why there are none. within: what a trial is made within, as where a library must not compile."""

    def __init__(self, device: Device, sizes: Sequence[int], graphs: Callable[[], Callable[[], Graph] | str],
                 within: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self.device, self.sizes, self.graphs, self.within = device, tuple(sizes), graphs, within
        self.verdicts: dict[Hashable, Verdict] = {}

    def verdict(self, key: Hashable, theirs: Call, ours: Call, inputs: Callable[[int, int], Inputs],
                limit: float) -> Verdict:
        """key: what was tried, its first part a name for people. inputs: of a number of tokens and a seed."""
        if key not in self.verdicts:
            with torch.inference_mode(), self.within():
                self.verdicts[key] = Trial(self.device, self.graphs(), theirs, ours, inputs, limit).verdict(self.sizes)
            self.device.give_back()
            log.info("%s", told(key, self.verdicts[key], len(self.sizes)))
        return self.verdicts[key]


@dataclass
class Trial:
    """One operator's. captured: its graphs, kept to its end, since the memory that they share goes with the last."""

    device: Device
    graph: Callable[[], Graph] | str
    theirs: Call
    ours: Call
    inputs: Callable[[int, int], Inputs]
    limit: float
    captured: list[Graph] = field(default_factory=list)

    def verdict(self, sizes: Sequence[int]) -> Verdict:
        """What raises for some numbers of tokens is left there; what gives wrong numbers once is left altogether."""
        ratios: dict[int, float] = {}
        refused = None
        for tokens in sizes:
            try:
                if (reason := self.reason_against(tokens)) is None:
                    ratios[tokens] = self.ratio(tokens)
            except Exception as error:  # whatever a build, a launch or a capture raises is the reason
                refused = refused or f"{type(error).__name__}: {error}"[:300] + f" (at {tokens} tokens)"
                continue
            if reason is not None:
                return Verdict(reason=f"{reason} (at {tokens} tokens)")
        mean = sum(ratios.values()) / len(ratios) if ratios else 1.0
        return Verdict(frozenset(ratios), frozenset(n for n, ratio in ratios.items() if ratio <= 1), mean, refused)

    def reason_against(self, tokens: int) -> str | None:
        """Of its numbers, eagerly and replayed with other inputs than it was captured with."""
        first, second = self.inputs(tokens, 0), self.inputs(tokens, 1)
        reason = difference(self.theirs(*first.tensors), self.ours(*first.tensors), first.live, self.limit)
        if reason is not None or isinstance(self.graph, str):
            return reason
        place = [part.clone() for part in first.tensors]
        graph, out = self.capture(lambda: self.theirs(*place))
        for part, value in zip(place, second.tensors, strict=True):
            part.copy_(value)
        graph.replay()
        reason = difference(out, self.ours(*second.tensors), second.live, self.limit)
        return None if reason is None else f"replayed from a graph, {reason}"

    def ratio(self, tokens: int) -> float:
        """Of its time to ours, where graphs leave the host's share out of it; else 1."""
        if self.device.host or isinstance(self.graph, str):
            return 1.0
        tensors = self.inputs(tokens, 0).tensors
        return self.seconds(self.theirs, tensors) / self.seconds(self.ours, tensors)

    def capture(self, call: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """On a stream of its own, after two runs in which libraries set themselves up."""
        with (torch.inference_mode() if self.device.host else torch.Stream(self.device.torch)):
            for _ in range(0 if self.device.host else 2):
                call()
            self.device.wait()
            graph = self.graph()
            graph.capture_begin()
            try:
                out = call()
            finally:
                graph.capture_end()
        self.captured.append(graph)
        self.device.wait()
        return graph, out

    def seconds(self, call: Call, tensors: Sequence[torch.Tensor]) -> float:
        """Of `CALLS` calls, the shortest of some rounds."""
        def many() -> torch.Tensor:
            for _ in range(CALLS):
                out = call(*tensors)
            return out
        graph, _ = self.capture(many)
        took = []
        for _ in range(1 + ROUNDS):
            start = time.perf_counter()
            graph.replay()
            self.device.wait()
            took.append(time.perf_counter() - start)
        return min(took[1:])


def told(key: Hashable, found: Verdict, sizes: int) -> str:
    """A verdict for people."""
    name = " ".join(map(str, key)) if isinstance(key, tuple) else str(key)
    if not found.right:
        return f"{name}: left to Triton: {found.reason}"
    return (f"{name}: our numbers at {len(found.right)} of {sizes} sizes, no slower at {len(found.faster)}, on average "
            f"{found.ratio:.2f} of our time" + (f"; else {found.reason}" if found.reason else ""))
