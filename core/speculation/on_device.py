"""Drafters that compute with a model: k tokens in k steps of one token a row, and the host waits for the last alone."""
from __future__ import annotations

from typing import Any

import numpy as np

from ..plan import Batch, Out, Sampling, StepResult
from ..scheduler.rows import Rows
from ..scheduler.table import DRAWN, MIN_P, TOP_K, TOP_P
from .contract import Drafter, Option, Proposals, Setup, View, Ways

BRANCHES = {"branches": Option(0, 0, 8, "further ways for each draft, the likeliest tokens beside it: a tree")}


class ModelDrafter(Drafter):
    """Drafts with the steps of `Setup.model`, on the state that the model's own steps have kept K and V for it in.

    A request that samples has its drafts drawn by the same random numbers and parameters as its tokens will be: so two
    models that agree about a distribution agree about the token too.
    """

    on_device = True

    def __init__(self, setup: Setup):
        self._device, self._model = setup.device, setup.model
        self._page_size, self._vocab_size = setup.page_size, setup.vocab_size
        self._steps: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}
        self._ids = self._model.ids
        self._branches = setup.options.get("branches", 0)
        self._top = np.zeros(self._branches + 1, np.int32) if self._branches else None

    def propose(self, view: View) -> Proposals | Ways:
        table, launched = self._device.scheduler.table, []
        places, rows = np.arange(len(view.slots)), None
        for step in range(int(view.most.max(initial=0))):
            if rows is None or (view.most[places] <= step).any():
                places = np.flatnonzero(view.most > step)
                rows = Rows(table, view.slots[places])
            launched.append((places, self._launch(view, places, rows, step)))
        results = [(those, out.collect()) for those, out in launched]
        drafted = np.zeros((len(view.slots), len(launched)), np.int32)
        for step, (those, result) in enumerate(results):
            tokens = result.tokens[:len(those)]
            drafted[those, step] = tokens if self._ids is None else self._ids[tokens]
        counts = np.minimum(view.most, (np.pad(drafted, ((0, 0), (0, 1)), constant_values=self._vocab_size)
                                        >= self._vocab_size).argmax(1))
        if self._branches:
            return self._tree(drafted, counts, results)
        return Proposals(counts, drafted[np.arange(drafted.shape[1]) < counts[:, None]])

    def _tree(self, drafted: np.ndarray, counts: np.ndarray, results: list[tuple[np.ndarray, StepResult]]) -> Ways:
        """Each draft, and the likeliest ways to leave it: those whose tokens' log-probabilities have the largest sums.
        """
        ways: list[list[tuple[float, np.ndarray]]] = [[] for _ in counts]
        so_far = np.zeros(len(counts))
        for step, (those, result) in enumerate(results):
            top = result.top_ids if self._ids is None else self._ids[result.top_ids]
            for request, ids, logprobs in zip(those.tolist(), top, result.top_logprobs, strict=False):
                if step < max(1, counts[request]):
                    ways[request] += [(so_far[request] + logprob, np.append(drafted[request, :step], token))
                                      for token, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True)
                                      if token != drafted[request, step] and token < self._vocab_size]
            so_far[those] += result.logprobs[:len(those)]
        chains, owners = [], []
        for request, (draft, count, others) in enumerate(zip(drafted, counts.tolist(), ways, strict=True)):
            others.sort(key=lambda way: -way[0])
            chains += [draft[:count], *(way for _, way in others[:self._branches])]
            owners += [request] * (1 + min(self._branches, len(others)))
        return Ways(np.array([len(chain) for chain in chains], np.int32), np.concatenate(chains, dtype=np.int32),
                         np.array(owners, np.int32))

    def _launch(self, view: View, places: np.ndarray, rows: Rows, step: int) -> Out:
        """The step that draws these requests' drafted tokens number `step`."""
        known, size, numbers = view.known[places], self._page_size, rows.numbers
        at = known - 1 + step
        tokens = rows.untold if step else view.tokens[rows.slots, at]
        page = at // size
        pages = view.pages[rows.slots, :int(page.max()) + 1]
        slots = (pages[numbers[:-1], page] - page) * size + at
        pages[np.arange(pages.shape[1]) > page[:, None]] = 0
        after = step > 0 and self._ids is not None
        model = self._model._replace(weights=self._model.after) if after else self._model
        return self._device.launch_beside(self._steps[after], model, Batch(
            tokens, at, slots, numbers[:-1], rows.seqs, numbers, at + 1, pages, numbers[:-1], rows.untold,
            _sampling(rows, known + step)._replace(top_logprobs=self._top)))


def _sampling(rows: Rows, lengths: np.ndarray) -> Sampling:
    """How tokens are drawn that come after `lengths`: as the model draws them, but for penalties, biases and masks."""
    asked = rows.asked
    if not asked & DRAWN:
        return Sampling()
    return Sampling(rows.temperature, rows.uniform(lengths - rows.prompt_len), rows.top_k if asked & TOP_K else None,
                    rows.top_p if asked & TOP_P else None, rows.min_p if asked & MIN_P else None)
