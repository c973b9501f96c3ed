"""What is computed in one step."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..plan import Range, StepPlan
from .request import Request
from .rows import Rows


class Chunk(NamedTuple):
    """Prompt tokens `start` to `stop` of a request; `scores` of its first tokens are scored, `sample` its last."""

    request: Request
    slot: int
    start: int
    stop: int
    scores: int
    sample: bool

    @property
    def size(self) -> int:
        return self.stop - self.start


class Plan(NamedTuple):
    """One step: the slots that decode a token each, and the prefill chunks. Sampled logit rows are those of `decode`,
    then those of the chunks; each chunk's scored rows come before its sampled one.

    lengths: of the rows in `decode`, with the token that they compute. rows: what there is about them, as it was when
    this was planned.
    """

    step: int
    decode: np.ndarray
    lengths: np.ndarray
    chunks: list[Chunk]
    rows: Rows

    @property
    def prompt_tokens(self) -> int:
        return sum([c.size for c in self.chunks])

    def record(self) -> StepPlan:
        """The plan as plain integers."""
        ranges = [Range(slot, length - 1, length, True)
                  for slot, length in zip(self.decode.tolist(), self.lengths.tolist(), strict=True)]
        ranges += [Range(c.slot, c.start, c.stop, c.sample) for c in self.chunks]
        return StepPlan(self.step, tuple(ranges))
