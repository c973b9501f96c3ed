"""Drafters that compute with a model: k tokens in k steps of one token a row, and the host waits for the last alone."""
from __future__ import annotations

from typing import Any

import numpy as np

from ..plan import Batch, Out, Sampling
from ..scheduler.rows import Rows
from ..scheduler.table import DRAWN, MIN_P, TOP_K, TOP_P
from .contract import Drafter, Proposals, Setup, View


class ModelDrafter(Drafter):
    """Drafts with the steps of `Setup.model`, on the state that the model's own steps have kept K and V for it in.

    A request that samples has its drafts drawn by the same random numbers and parameters as its tokens will be: so two
    models that agree about a distribution agree about the token too.
    """

    on_device = True

    def __init__(self, setup: Setup):
        self._device, self._model = setup.device, setup.model
        self._page_size, self._vocab_size = setup.page_size, setup.vocab_size
        self._steps: dict[Any, Any] = {}

    def propose(self, view: View) -> Proposals:
        table, launched = self._device.scheduler.table, []
        places, rows = np.arange(len(view.slots)), None
        for step in range(int(view.most.max(initial=0))):
            if rows is None or (view.most[places] <= step).any():
                places = np.flatnonzero(view.most > step)
                rows = Rows(table, view.slots[places])
            launched.append((places, self._launch(view, places, rows, step)))
        drafted = np.zeros((len(view.slots), len(launched)), np.int32)
        for step, (those, out) in enumerate(launched):
            drafted[those, step] = out.collect().tokens[:len(those)]
        counts = np.minimum(view.most, (np.pad(drafted, ((0, 0), (0, 1)), constant_values=self._vocab_size)
                                        >= self._vocab_size).argmax(1))
        return Proposals(counts, drafted[np.arange(drafted.shape[1]) < counts[:, None]])

    def _launch(self, view: View, places: np.ndarray, rows: Rows, step: int) -> Out:
        """The step that draws these requests' drafted tokens number `step`."""
        known, size, numbers = view.known[places], self._page_size, rows.numbers
        at = known - 1 + step
        tokens = rows.untold if step else view.tokens[rows.slots, at]
        page = at // size
        pages = view.pages[rows.slots, :int(page.max()) + 1]
        slots = (pages[numbers[:-1], page] - page) * size + at
        pages[np.arange(pages.shape[1]) > page[:, None]] = 0
        return self._device.launch_beside(self._steps, self._model, Batch(
            tokens, at, slots, numbers[:-1], rows.seqs, numbers, at + 1, pages, numbers[:-1], rows.untold,
            _sampling(rows, known + step)))


def _sampling(rows: Rows, lengths: np.ndarray) -> Sampling:
    """How tokens are drawn that come after `lengths`: as the model draws them, but for penalties, biases and masks."""
    asked = rows.asked
    if not asked & DRAWN:
        return Sampling()
    return Sampling(rows.temperature, rows.uniform(lengths - rows.prompt_len), rows.top_k if asked & TOP_K else None,
                    rows.top_p if asked & TOP_P else None, rows.min_p if asked & MIN_P else None)
