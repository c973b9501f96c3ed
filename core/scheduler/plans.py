"""What is computed in one step."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..plan import Range, StepPlan
from .request import Request
from .table import RequestTable


class Chunk(NamedTuple):
    """Prompt tokens `start` to `stop` of a request; `scores` of its first tokens are scored, `sample` its last."""

    request: Request
    slot: int
    start: int
    stop: int
    scores: int
    sample: bool


class Plan(NamedTuple):
    """One step: the slots that decode a token each, and the prefill chunks. Sampled logit rows are those of `decode`,
    then those of the chunks; each chunk's scored rows come before its sampled one.

    owners, generations: the requests in the slots of `decode`, and the slots' generations, when it was planned.
    """

    step: int
    decode: np.ndarray
    chunks: list[Chunk]
    owners: np.ndarray
    generations: np.ndarray

    @property
    def prompt_tokens(self) -> int:
        return sum([c.stop - c.start for c in self.chunks])

    def record(self, table: RequestTable) -> StepPlan:
        """The plan as plain integers."""
        ranges = [Range(int(s), int(table.length[s]) - 1, int(table.length[s]), True) for s in self.decode]
        ranges += [Range(c.slot, c.start, c.stop, c.sample) for c in self.chunks]
        return StepPlan(self.step, tuple(ranges))
