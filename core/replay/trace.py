"""A trace of requests: when they arrive, how long they are, and which blocks of tokens their prompts share."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..errors import IsthmusError, shown

MAX_SECONDS = 1e11    # on either side of zero: a time of day in seconds has its place, one in milliseconds has not
MAX_TOKENS = 2**31    # below it, of a prompt or an output
MAX_BLOCKS = 2**27    # of a trace

class TraceError(IsthmusError):
    """A trace that cannot be read; the message names the file, the line and the way out."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival.

    arrival: seconds, float64 [n]. inputs, outputs: tokens, int64 [n]. starts: int64 [n + 1], where a request's blocks
    begin in `blocks`: int32, numbers 0, 1, ... of whole prefixes, so that equal numbers mean equal text up to there.
    Only whole blocks of `block` tokens are named. hinted: what the trace itself says of endings, bool [n].
    form: what the file was taken for, for people.
    """

    name: str
    block: int
    arrival: np.ndarray
    inputs: np.ndarray
    outputs: np.ndarray
    starts: np.ndarray
    blocks: np.ndarray
    hinted: np.ndarray
    form: str = ""

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
        rows = ((float(self.arrival[i]), int(self.inputs[i]), int(self.outputs[i]), "", self.request(i),
                 bool(self.hinted[i])) for i in range(min(count, len(self))))
        return replace(make_trace(self.name, self.block, rows), form=self.form)

    @cached_property
    def next_use(self) -> np.ndarray:
        """For each entry of `blocks`, the next request that names it again, int64; `len(self)` when none does."""
        owner = np.repeat(np.arange(len(self)), np.diff(self.starts))
        order = np.argsort(self.blocks, kind="stable")
        following = np.full(len(order), len(self))
        same = self.blocks[order[1:]] == self.blocks[order[:-1]]
        following[:-1][same] = owner[order[1:]][same]
        result = np.empty(len(order), np.int64)
        result[order] = following
        return result

    @cached_property
    def segments(self) -> Segments:
        """Its blocks, as few at a time as can be told apart."""
        return Segments(self)

    def dead_ends(self) -> np.ndarray:
        """Requests whose last block nobody names again: bool [n]. A request without a whole block is none."""
        counts = np.diff(self.starts)
        ends = np.zeros(len(self), bool)
        some = counts > 0
        ends[some] = self.next_use[self.starts[1:][some] - 1] == len(self)
        return ends

    def seen_before(self) -> np.ndarray:
        """Blocks at the front of each request that an earlier one has named, int64 [n]: what no eviction would hit."""
        owner = np.repeat(np.arange(len(self)), np.diff(self.starts))
        first = np.full(self.unique, len(self))
        np.minimum.at(first, self.blocks, owner)
        known = np.concatenate([[0], np.cumsum(first[self.blocks] < owner)])
        return known[self.starts[1:]] - known[self.starts[:-1]]


class Segments:
    """Blocks that occur in the same requests only, one after the other, taken as one of that `weight`.

    paths[i]: the segments of request i, front to back.  next_use: of each entry of all paths, one after the other.
    """

    def __init__(self, trace: Trace):
        refs, starts = trace.blocks, trace.starts
        uses = np.bincount(refs, minlength=trace.unique)
        first = np.zeros(len(refs), bool)
        first[starts[:-1][np.diff(starts) > 0]] = True
        head = first.copy()
        head[1:] |= uses[refs[1:]] != uses[refs[:-1]]  # a child as often used as its parent is always used with it
        heads = np.flatnonzero(head)
        names, ids = np.unique(refs[heads], return_inverse=True)
        sizes = np.diff(np.append(heads, len(refs)))
        self.weight = np.zeros(len(names), np.int64)
        self.weight[ids] = sizes
        bounds = np.searchsorted(heads, starts).tolist()
        listed, following = ids.tolist(), trace.next_use[heads].tolist()
        self.paths = [listed[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
        self.next_use = [following[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def make_trace(name: str, block: int, rows: Iterable[tuple[float, int, int, object, Sequence, bool]]) -> Trace:
    """A trace from (arrival, input tokens, output tokens, namespace, ids of whole blocks, hinted) rows.

    An id counts together with all before it and the namespace: it may name a block's own text or the prefix up to it.
    Raises `TraceError` that names the row for one that cannot be.
    """
    arrival, inputs, outputs, spaces, hinted, counts, ids = [], [], [], [], [], [], []
    total = 0
    for number, (at, tokens, out, space, named, hint) in enumerate(rows, 1):
        total += len(named)
        if problem := _impossible(at, tokens, out, len(named), block, total):
            raise TraceError(f"{name}: request {number}: {problem}")
        arrival.append(at)
        inputs.append(tokens)
        outputs.append(out)
        spaces.append(space)
        hinted.append(hint)
        counts.append(len(named))
        ids.append(named)
    if not arrival:
        raise TraceError(f"{name}: there is no request in it")
    times, starts = np.array(arrival, np.float64), np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    blocks = _numbered(ids, starts) if len(set(spaces)) == 1 else None
    if blocks is None:
        blocks = _chained(ids, spaces)
    trace = Trace(name, block, times - times.min(), np.array(inputs, np.int64), np.array(outputs, np.int64), starts,
                  blocks, np.array(hinted, bool))
    return trace if (np.diff(times) >= 0).all() else _sorted(trace)


def _impossible(at: float, tokens: int, out: int, blocks: int, block: int, total: int) -> str:
    """What is wrong with a request's numbers, "" when nothing is."""
    if not abs(at) <= MAX_SECONDS:  # not a number is none
        return f"the time is {at:g} s, from {-MAX_SECONDS:g} to {MAX_SECONDS:g} is allowed"
    for what, count in (("input", tokens), ("output", out)):
        if not 0 <= count < MAX_TOKENS:
            return f"its {what} is {shown(count)} tokens, from 0 to {MAX_TOKENS - 1} are allowed"
    if not tokens // block <= blocks <= -(-tokens // block):
        return f"{blocks} blocks of {block} tokens are not what a prompt of {tokens} tokens has"
    if total > MAX_BLOCKS:
        return f"more than {MAX_BLOCKS:,} blocks in all are not read: take larger ones (--block-tokens)"
    return ""


def _numbered(ids: list[Sequence], starts: np.ndarray) -> np.ndarray | None:
    """Numbers in order of appearance, where each id always stands behind the same one; None where they do not."""
    if not all(isinstance(part, np.ndarray | range) or isinstance(part, list) and all(type(i) is int for i in part)
               for part in ids):
        return None
    try:
        flat = np.concatenate([np.asarray(part, np.int64) for part in ids])
    except OverflowError:
        return None
    values, first, inverse = np.unique(flat, return_index=True, return_inverse=True)
    rank = np.empty(len(values), np.int64)
    rank[np.argsort(first)] = np.arange(len(values))
    numbers = rank[inverse]
    before = np.concatenate([[-1], numbers[:-1]])[:len(numbers)]
    before[starts[:-1][np.diff(starts) > 0]] = -1
    parent = np.full(len(values), -1)
    parent[numbers] = before
    return numbers.astype(np.int32) if (parent[numbers] == before).all() else None


def _chained(ids: list[Sequence], spaces: list[object]) -> np.ndarray:
    """Numbers of (all before it, id), one by one."""
    numbers: dict[tuple[object, object], int] = {}
    blocks = []
    for space, named in zip(spaces, ids, strict=True):
        parent: object = ("root", space)
        for key in named.tolist() if isinstance(named, np.ndarray) else named:
            parent = numbers.setdefault((parent, key), len(numbers))
            blocks.append(parent)
    return np.array(blocks, np.int32)


def _sorted(trace: Trace) -> Trace:
    """The same requests by arrival; those of one moment stay in their order."""
    order = np.argsort(trace.arrival, kind="stable")
    counts = np.diff(trace.starts)[order]
    parts = [trace.request(i) for i in order.tolist()]
    return Trace(trace.name, trace.block, trace.arrival[order], trace.inputs[order], trace.outputs[order],
                 np.concatenate([[0], np.cumsum(counts)]), np.concatenate(parts), trace.hinted[order])
