"""Drives a loaded model on a platform without the engine: a page table and a batch builder in a few lines."""
from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.models.loader import LoadedModel, load_model
from ..core.plan import Batch, Sampling
from ..core.platform import Bucket, Manifest, StateSpec, Step
from ..core.weights.checkpoint import open_checkpoint
from .fitting import fitted

Work = tuple[int, Sequence[int]]  # a sequence slot and its new tokens


class Bare:
    """Ops whose `sample` gives the logits back, so that a step collects them."""

    def __init__(self, ops: Any):
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def sample(self, logits: Any, softcap: float | None = None) -> Any:
        return logits


class Model:
    """A model placed on a platform, and its steps, compiled once for each bucket."""

    def __init__(self, platform: Any, manifest: Manifest, path: Path, dtype: str, page_size: int):
        self.platform, self.manifest, self.page_size, self.dtype = platform, manifest, page_size, dtype
        with open_checkpoint(path) as checkpoint:
            self.loaded: LoadedModel = load_model(checkpoint, platform, manifest, dtype, page_size=page_size,
                                                  world=manifest.local_ranks)
        self._steps: dict[tuple[bool, Bucket | None], Step] = {}

    def step(self, bare: bool, bucket: Bucket | None) -> Step:
        """bare: the step collects logits, else it samples."""
        forward = self.loaded.forward
        if (bare, bucket) not in self._steps:
            chosen = (lambda ops, w, batch: forward(Bare(ops), w, batch)) if bare else forward
            self._steps[bare, bucket] = self.platform.compile(chosen, self.loaded.weights, bucket)
        return self._steps[bare, bucket]

    def capped(self, logits: np.ndarray) -> np.ndarray:
        """Logits after the model's soft cap, which `sample` would have put on."""
        cap = self.loaded.config.logit_softcap
        return cap * np.tanh(logits / cap) if cap else logits


class Launched:
    """A step in flight whose logits are wanted; `counts` are the new tokens of each row, in the batch's order."""

    def __init__(self, driver: Driver, out: Any, order: list[int], batch: Batch):
        self._driver, self._out, self._order, self._batch = driver, out, order, batch

    def collect(self) -> list[np.ndarray]:
        """Logits [new tokens, V] of each row, in the order that was asked for."""
        rows = len(self._order)
        values = np.asarray(self._out.collect())[:self._batch.starts[rows]]
        parts = np.split(self._driver.model.capped(values), self._batch.starts[1:rows])
        result = [np.empty(0)] * rows
        for at, part in zip(self._order, parts, strict=True):
            result[at] = part
        return result


class Driver:
    """A state of one model and who owns which page. Pages are handed out in random order, each once.

    larger: how many buckets above the fitting one each dimension is padded to, where the platform has buckets.
    """

    def __init__(self, model: Model, pages: int = 128, seqs: int = 40, kv_dtype: str | None = None, larger: int = 0):
        self.model, self.page_size, self.larger = model, model.page_size, larger
        kv_dtypes = model.manifest.kv_dtypes
        kv_dtype = kv_dtype or (model.dtype if model.dtype in kv_dtypes else kv_dtypes[0])
        self.spec = StateSpec(model.loaded.state_layers, kv_dtype, self.page_size, seqs)
        self.state = model.platform.alloc(self.spec, pages)
        self.free = list(range(1, pages))
        random.Random(0).shuffle(self.free)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.adapters: dict[int, int] = {}  # of sequence slots; with none, no batch has any

    def logits(self, *work: Work) -> list[np.ndarray]:
        """Run one step with new tokens for some sequence slots; logits [new tokens, V] of each, in order of `work`."""
        return self.launch(*work).collect()

    def launch(self, *work: Work) -> Launched:
        """The same without waiting."""
        order = sorted(range(len(work)), key=lambda i: len(work[i][1]) > 1)
        batch = self.batch([work[i] for i in order], every=True)
        return Launched(self, self.run(batch, bare=True), order, batch)

    def sample(self, *work: Work) -> np.ndarray:
        """Run one step and sample greedily after each row's last token; rows of one token must come first."""
        return self.launch_sampling(*work).collect().tokens[:len(work)]

    def launch_sampling(self, *work: Work) -> Any:
        """The same without waiting."""
        return self.run(self.batch(work, every=False), bare=False)

    def run(self, batch: Batch, bare: bool) -> Any:
        """Launch any batch."""
        batch, bucket = fitted(batch, self.model.manifest.buckets, self.larger)
        out, self.state = self.model.step(bare, bucket)(self.state, batch)
        return out

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> np.ndarray:
        """[prompts, count] greedy tokens; every decode step takes its input from the State."""
        tokens = [self.sample((seq, prompt))[0] for seq, prompt in enumerate(prompts, 1)]
        steps = [np.array(tokens)]
        for _ in range(count - 1):
            steps.append(self.sample(*((seq, [-1]) for seq in range(1, len(prompts) + 1))))
        return np.stack(steps, axis=1)

    def share(self, source: int, target: int, tokens: int) -> None:
        """`target` begins with the pages of the first `tokens` tokens of `source`, whole pages only."""
        assert tokens % self.page_size == 0
        self.tables[target] = self.tables[source][:tokens // self.page_size]
        self.lengths[target] = tokens

    def fresh(self, count: int) -> list[int]:
        """Pages that nobody has."""
        return [self.free.pop() for _ in range(count)]

    def batch(self, work: Sequence[Work], every: bool) -> Batch:
        """The arrays of one step; logits of every token, or of each row's last. Rows of one token must come first."""
        positions, slots, lengths, tables = [], [], [], []
        for seq, tokens in work:
            start = self.lengths.get(seq, 0)
            stop = self.lengths[seq] = start + len(tokens)
            table = self.tables.setdefault(seq, [])
            while len(table) * self.page_size < stop:
                table.append(self.free.pop())
            place = np.arange(start, stop)
            positions.append(place)
            slots.append(np.array(table)[place // self.page_size] * self.page_size + place % self.page_size)
            lengths.append(stop)
            tables.append(table[:-(-stop // self.page_size)])
        counts = [len(tokens) for _, tokens in work]
        starts = np.concatenate([[0], np.cumsum(counts)])
        pages = np.zeros((len(work), max(map(len, tables))), np.int32)
        for row, table in zip(pages, tables, strict=True):
            row[:len(table)] = table
        wanted = np.arange(starts[-1]) if every else starts[1:] - 1
        owners = np.repeat([self.adapters.get(seq, 0) for seq, _ in work], counts).astype(np.int32)
        return Batch(*(np.asarray(a, np.int32) for a in (
            np.concatenate([list(tokens) for _, tokens in work]), np.concatenate(positions), np.concatenate(slots),
            np.repeat(np.arange(len(work)), counts), [seq for seq, _ in work], starts, lengths, pages, wanted,
            np.full(len(wanted), -1))), Sampling(), owners if self.adapters else None)
