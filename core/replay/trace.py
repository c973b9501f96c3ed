"""A trace of requests: when they arrive, how long they are, and which blocks of tokens their prompts share."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..errors import IsthmusError


class TraceError(IsthmusError):
    """A trace that cannot be read; the message names the file, the line and the way out."""


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival.

    arrival: seconds, float64 [n]. inputs, outputs: tokens, int64 [n]. starts: int64 [n + 1], where a request's blocks
    begin in `blocks`: int32, numbers 0, 1, ... of whole prefixes, so that equal numbers mean equal text up to there.
    Only whole blocks of `block` tokens are named. hinted: what the trace itself says of endings, bool [n].
    """

    name: str
    block: int
    arrival: np.ndarray
    inputs: np.ndarray
    outputs: np.ndarray
    starts: np.ndarray
    blocks: np.ndarray
    hinted: np.ndarray

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def unique(self) -> int:
        """Different blocks: the working set."""
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    @property
    def working_set(self) -> int:
        """Tokens in different blocks."""
        return self.unique * self.block

    def request(self, i: int) -> np.ndarray:
        """The blocks of request `i`, int32."""
        return self.blocks[self.starts[i]:self.starts[i + 1]]

    def head(self, count: int) -> Trace:
        """The first `count` requests."""
        rows = ((float(self.arrival[i]), int(self.inputs[i]), int(self.outputs[i]), "", self.request(i).tolist(),
                 bool(self.hinted[i])) for i in range(min(count, len(self))))
        return make_trace(self.name, self.block, rows)

    def next_use(self) -> np.ndarray:
        """For each entry of `blocks`, the next request that names it again, int64; `len(self)` when none does."""
        owner = np.repeat(np.arange(len(self)), np.diff(self.starts))
        order = np.lexsort((owner, self.blocks))
        following = np.full(len(order), len(self))
        same = self.blocks[order[1:]] == self.blocks[order[:-1]]
        following[:-1][same] = owner[order[1:]][same]
        result = np.empty(len(order), np.int64)
        result[order] = following
        return result

    def dead_ends(self) -> np.ndarray:
        """Requests whose last block nobody names again: bool [n]. A request without a whole block is none."""
        counts = np.diff(self.starts)
        ends = np.zeros(len(self), bool)
        some = counts > 0
        ends[some] = self.next_use()[self.starts[1:][some] - 1] == len(self)
        return ends

    def seen_before(self) -> np.ndarray:
        """Blocks at the front of each request that an earlier one has named, int64 [n]: what no eviction would hit."""
        owner = np.repeat(np.arange(len(self)), np.diff(self.starts))
        first = np.full(self.unique, len(self))
        np.minimum.at(first, self.blocks, owner)
        known = np.concatenate([[0], np.cumsum(first[self.blocks] < owner)])
        return known[self.starts[1:]] - known[self.starts[:-1]]


def make_trace(name: str, block: int, rows: Iterable[tuple[float, int, int, object, Iterable[int], bool]]) -> Trace:
    """A trace from (arrival, input tokens, output tokens, namespace, ids of whole blocks, hinted) rows.

    An id counts together with all before it and the namespace: it may name a block's own text or the prefix up to it.
    """
    numbers: dict[tuple[object, int], int] = {}
    arrival, inputs, outputs, hinted, starts, blocks = [], [], [], [], [0], []
    for at, tokens, out, space, ids, hint in rows:
        parent: object = ("root", space)
        for key in ids:
            parent = numbers.setdefault((parent, key), len(numbers))
            blocks.append(parent)
        starts.append(len(blocks))
        arrival.append(at)
        inputs.append(tokens)
        outputs.append(out)
        hinted.append(hint)
    if not arrival:
        raise TraceError(f"{name}: there is no request in it")
    times = np.array(arrival, np.float64)
    trace = Trace(name, block, times - times.min(), np.array(inputs, np.int64), np.array(outputs, np.int64),
                  np.array(starts, np.int64), np.array(blocks, np.int32), np.array(hinted, bool))
    return trace if (np.diff(times) >= 0).all() else _sorted(trace)


def _sorted(trace: Trace) -> Trace:
    """The same requests by arrival; those of one moment stay in their order."""
    order = np.argsort(trace.arrival, kind="stable")
    counts = np.diff(trace.starts)[order]
    parts = [trace.request(i) for i in order.tolist()]
    return Trace(trace.name, trace.block, trace.arrival[order], trace.inputs[order], trace.outputs[order],
                 np.concatenate([[0], np.cumsum(counts)]), np.concatenate(parts), trace.hinted[order])
