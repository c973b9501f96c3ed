"""Runs programs: one pool of threads and one arena for all of them."""
from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ....core.platform import Batch, Sampling
from ..memory import huge_bytes
from .library import ARRAYS, LAYER, OP, STEP, Library
from .tape import EMBED, LINEAR, Tape, Untraceable, trace
from .weights import Packed

log = logging.getLogger(__name__)

PROGRAMS = 256  # kept of one model; making one takes a few milliseconds


@dataclass
class Program:
    """ops: relative to the arena. placed: where it was when they were last made absolute."""

    tape: Tape
    ops: np.ndarray
    placed: int = 0

    def at(self, base: int) -> np.ndarray:
        """The ops with the arena at `base`."""
        for name in "xyz" if base != self.placed else "":
            at = self.ops[name]["at"]
            at[at != 0] += base - self.placed
        self.placed = base
        return self.ops


class Runner:
    """The threads, which end with `close`. One program runs at a time."""

    def __init__(self, library: Library, threads: int) -> None:
        self.library, self._engine = library, library.engine(threads)
        self._arena = huge_bytes(1 << 20)

    def close(self) -> None:
        """End the threads."""
        if self._engine is not None:
            self.library.close(self._engine)
            self._engine = None

    def run(self, program: Program, layers: np.ndarray, page_size: int, batch: Batch, tokens: np.ndarray) -> np.ndarray:
        """Logits float32 [L, V], in memory that the next step uses again. tokens: without -1."""
        if program.tape.arena.end > len(self._arena):
            self._arena = huge_bytes(2 * program.tape.arena.end)
        base = self._arena.ctypes.data
        given = {name: np.ascontiguousarray(tokens if name == "tokens" else getattr(batch, name), np.int32)
                 for name in ARRAYS}
        step = np.zeros((), STEP)
        for name, array in given.items():
            step[name] = array.ctypes.data
        if program.tape.columns is not None:
            program.tape.columns.fill(batch.adapters)
        step["rows"], step["page_stride"] = len(batch.lengths), batch.pages.shape[1]
        step["page_size"], step["layers"] = page_size, layers.ctypes.data
        ops = program.at(base)
        self.library.run(self._engine, ops.ctypes.data, len(ops), step.ctypes.data)
        out = program.tape.output
        assert out.memory is not None
        start = out.memory.start + 4 * out.offset
        rows = self._arena[start:start + 4 * out.shape[0] * out.stride].view(np.float32)
        return rows.reshape(out.shape[0], out.stride)[:, :out.shape[1]]


    def product(self, x: np.ndarray, weight: Packed, out: np.ndarray) -> None:
        """out = x times the weight; float32 [T, in] and [T, out]."""
        self._one(LINEAR, weight, out, x=(x.ctypes.data, x.shape[1], 0), rows=len(x))

    def look_up(self, ids: np.ndarray, weight: Packed, out: np.ndarray) -> None:
        """out = rows of the weight; ids int32 [n], out float32 [n, in]."""
        self._one(EMBED, weight, out, ids, rows=len(ids))

    def _one(self, kind: int, weight: Packed, out: np.ndarray, tokens: np.ndarray | None = None,
             **fields: Any) -> None:
        op, step = np.zeros((), OP), np.zeros((), STEP)
        op["kind"], op["act"], op["z"] = kind, -1, (out.ctypes.data, out.shape[1], 0)
        for name, value in fields.items():
            op[name] = value
        weight.fill(op["w"])
        step["tokens"] = 0 if tokens is None else tokens.ctypes.data
        self.library.run(self._engine, op.ctypes.data, 1, step.ctypes.data)


@dataclass
class Compiled:
    """A forward and its programs by sizes. reason: why it cannot be one, once that is known."""

    runner: Runner
    forward: Callable[[Any, Any, Any], Any]
    weights: Any
    reason: str | None = None
    programs: OrderedDict[tuple[int, int], Program] = field(default_factory=OrderedDict)
    told: set[str] = field(default_factory=set)

    def program(self, tokens: int, logits: int) -> Program | None:
        """The program for these sizes; None where the forward needs what is not compiled."""
        if self.reason is not None:
            return None
        found = self.programs.get((tokens, logits))
        if found is None:
            try:
                found = self._trace(tokens, logits)
            except Untraceable as error:
                self.reason = str(error)
                self.tell(self.reason)
                return None
            while len(self.programs) >= PROGRAMS:
                self.programs.popitem(last=False)
            self.programs[tokens, logits] = found
        self.programs.move_to_end((tokens, logits))
        return found

    def tell(self, reason: str) -> None:
        """Say once for these weights why torch computes: it is slower."""
        if self.weights and reason not in self.told:
            self.told.add(reason)
            log.warning("torch computes the steps, the compiled kernels have nothing for: %s", reason)

    def _trace(self, tokens: int, logits: int) -> Program:
        tape = Tape(tokens, logits)
        fields = dict.fromkeys(Batch._fields) | {"tokens": tape.tokens, "logit_rows": tape.logit_rows,
                                                 "adapters": tape.adapters, "sampling": Sampling()}
        try:
            return Program(tape, trace(self.forward, self.weights, Batch(**fields), tape))
        except (AttributeError, TypeError, IndexError) as error:  # it asks a description for what only a tensor has
            raise Untraceable(f"{type(error).__name__}: {error}") from error


def cache_records(caches: Any) -> np.ndarray | None:
    """Where K and V of each layer lie; None where they are kept in another dtype than bf16."""
    if any(cache.dtype != torch.bfloat16 for cache in caches):
        return None
    records = np.zeros(len(caches), LAYER)
    for record, cache in zip(records, caches, strict=True):
        record["kv"], record["kv_heads"], record["d"] = cache.pages.data_ptr(), *cache.pages.shape[3:]
    return records
