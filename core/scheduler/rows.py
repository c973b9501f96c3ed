"""What the request table says of some rows that does not change while they have the same requests: read once."""
from __future__ import annotations

from functools import cached_property

import numpy as np

from ..plan import Bias
from .table import MASKED, PENALISED, SCORED, RequestTable, draw

AHEAD = 16  # draws of a row that are made at once, after the first
# Columns that are set when a request comes to its row, and not again.
CONSTANT = frozenset(("prompt_len", "end", "handle", "temperature", "top_k", "top_p", "min_p", "min_tokens", "seed",
                      "logprobs", "repetition", "presence", "frequency"))


class Rows:
    """n rows of the table, and as attributes the columns of `CONSTANT`, each read when it is first asked for.

    slots: int32 [n]. owners: the requests in them, object [n]. generations: of the slots. flags: what the requests ask
    for. asked: all flags in one. All of them are as they were when this was made; nobody changes these arrays.
    """

    def __init__(self, table: RequestTable, slots: np.ndarray):
        self._table, self.slots = table, slots
        self.owners, self.generations, self.flags = table.owner[slots], table.generation[slots], table.flags[slots]
        self.asked = int(np.bitwise_or.reduce(self.flags))
        self._draws, self._steps = np.zeros((0, 0), np.float32), np.zeros((1, 1), np.int32)  # and for which positions
        self.bias: tuple[bytes, Bias | None] | None = None  # the last one made, and for which rows stop ids are banned

    def __getattr__(self, name: str) -> np.ndarray:
        if name not in CONSTANT:
            raise AttributeError(f"{name} is no column that stays as it is")
        column = getattr(self._table, name)[self.slots]
        setattr(self, name, column)
        return column

    @cached_property
    def numbers(self) -> np.ndarray:
        """0 to n, int32 [n + 1]."""
        return np.arange(len(self.slots) + 1, dtype=np.int32)

    @cached_property
    def untold(self) -> np.ndarray:
        """Targets of rows that are all sampled: -1, int32 [n]."""
        return np.full(len(self.slots), -1, np.int32)

    @cached_property
    def scored(self) -> np.ndarray:
        """Which rows want log-probabilities: indices."""
        return (self.flags & SCORED).nonzero()[0]

    @cached_property
    def plain(self) -> np.ndarray:
        """Which rows want none: bool [n]."""
        return self.flags & SCORED == 0

    @cached_property
    def top(self) -> int:
        """The most log-probabilities that one of the rows wants; -1 for none."""
        return int(self.logprobs.max())

    @cached_property
    def penalised(self) -> np.ndarray:
        """Which rows have penalties: indices, int32."""
        return (self.flags & PENALISED).nonzero()[0].astype(np.int32)

    @cached_property
    def masked(self) -> np.ndarray:
        """Which rows have a grammar: indices, int32."""
        return (self.flags & MASKED).nonzero()[0].astype(np.int32)

    def uniform(self, steps: np.ndarray) -> np.ndarray:
        """Each row's draw at these positions of its output, int32 [n]: float32 [n].

        Rows that decode together go on together, one position a step, so that the next ones are made beforehand.
        """
        ahead = int(steps[0]) - int(self._steps[0, 0])
        if not (0 <= ahead < len(self._draws) and self._steps[ahead].tobytes() == steps.tobytes()):
            self._steps = steps + np.arange(AHEAD if len(self._draws) else 1, dtype=np.int32)[:, None]
            self._draws, ahead = draw(self.seed, self._steps), 0
        return self._draws[ahead]
