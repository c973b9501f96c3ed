"""What the request table says of some rows that does not change while they have the same requests: read once."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..plan import Bias
from .request import History
from .table import MASKED, PENALISED, SCORED, RequestTable, draw

AHEAD = 16  # draws of a row that are made at once, after the first
# Columns that are set when a request comes to its row, and not again.
CONSTANT = frozenset(("prompt_len", "end", "handle", "temperature", "top_k", "top_p", "min_p", "min_tokens", "seed",
                      "logprobs", "repetition", "presence", "frequency", "adapter"))
_NO_DRAWS = np.zeros((0, 0), np.float32)


class once:
    """An attribute that is made when it is first asked for: `functools.cached_property` without its lock, which costs
    more than most of what is made here."""

    def __init__(self, make: Callable[[Rows], Any]):
        self._make, self._name, self.__doc__ = make, make.__name__, make.__doc__

    def __get__(self, rows: Rows, kind: type[Rows]) -> Any:
        made = rows.__dict__[self._name] = self._make(rows)
        return made


class Rows:
    """n rows of the table, and as attributes the columns of `CONSTANT`, each read when it is first asked for.

    slots: intp [n], what indexing makes of any other each time. owners: the requests in them, object [n]. generations:
    of the slots. flags: what the requests ask for. asked: all flags in one. All of them are as they were when this was
    made; nobody changes these arrays.
    """

    def __init__(self, table: RequestTable, slots: np.ndarray):
        self._table, self.slots = table, (slots := np.asarray(slots, np.intp))
        self.owners, self.generations, self.flags = table.owner[slots], table.generation[slots], table.flags[slots]
        self.asked = int(np.bitwise_or.reduce(self.flags))
        self._draws, self._steps = _NO_DRAWS, _NO_DRAWS     # made beforehand, and for which positions
        self.bias: tuple[bytes, Bias | None] | None = None  # the last one made, and for which rows stop ids are banned

    def __getattr__(self, name: str) -> np.ndarray:
        if name not in CONSTANT:
            raise AttributeError(f"{name} is no column that stays as it is")
        column = self.__dict__[name] = getattr(self._table, name)[self.slots]
        return column

    @once
    def seqs(self) -> np.ndarray:
        """The slots as a batch has them, int32 [n]."""
        return self.slots.astype(np.int32)

    @once
    def histories(self) -> list[History]:
        """Of the rows that have penalties."""
        return [request.history for request in self.owners[self.penalised].tolist()]

    @once
    def numbers(self) -> np.ndarray:
        """0 to n, int32 [n + 1]."""
        return np.arange(len(self.slots) + 1, dtype=np.int32)

    @once
    def untold(self) -> np.ndarray:
        """Targets of rows that are all sampled: -1, int32 [n]."""
        return np.full(len(self.slots), -1, np.int32)

    @once
    def scored(self) -> np.ndarray:
        """Which rows want log-probabilities: indices."""
        return (self.flags & SCORED).nonzero()[0]

    @once
    def plain(self) -> np.ndarray:
        """Which rows want none: bool [n]."""
        return self.flags & SCORED == 0

    @once
    def top(self) -> int:
        """The most log-probabilities that one of the rows wants; -1 for none."""
        return int(self.logprobs.max())

    @once
    def penalised(self) -> np.ndarray:
        """Which rows have penalties: indices."""
        return (self.flags & PENALISED).nonzero()[0]

    @once
    def masked(self) -> np.ndarray:
        """Which rows have a grammar: indices."""
        return (self.flags & MASKED).nonzero()[0]

    @once
    def grammatical(self) -> list[Any]:
        """The requests of those rows."""
        return self.owners[self.masked].tolist()

    def uniform(self, steps: np.ndarray) -> np.ndarray:
        """Each row's draw at these positions of its output, int32 [n]: float32 [n].

        Rows that decode together go on together, one position a step, so that the next ones are made beforehand.
        """
        if self._draws is _NO_DRAWS:
            self._steps, self._draws = steps[None], (drawn := draw(self.seed, steps))[None]
            return drawn
        ahead = int(steps[0]) - int(self._steps[0, 0])
        if not (0 <= ahead < len(self._draws) and self._steps[ahead].tobytes() == steps.tobytes()):
            self._steps = steps + np.arange(AHEAD, dtype=np.int32)[:, None]
            self._draws, ahead = draw(self.seed, self._steps), 0
        return self._draws[ahead]
