"""Drives a loaded model on a platform without the engine: a page table and a batch builder in a few lines."""
from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from isthmus.core.discovery import load_platform
from isthmus.core.models.loader import LoadedModel, load_model
from isthmus.core.plan import Batch, Sampling
from isthmus.core.specs import StateSpec
from isthmus.core.weights.checkpoint import open_checkpoint


class _Bare:
    """Ops whose `sample` gives the logits back, so that a step collects them."""

    def __init__(self, ops: Any):
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def sample(self, logits: Any, softcap: float | None = None) -> Any:
        return logits


class Runner:
    """A model, its platform, its state and who owns which page. Pages are handed out in random order."""

    def __init__(self, platform_name: str, path: Path, dtype: str, kv_dtype: str | None = None, pages: int = 128,
                 seqs: int = 40, page_size: int | None = None, options: dict[str, str] | None = None):
        self.platform = load_platform(platform_name, options)
        self.manifest = self.platform.probe()
        self.page_size = page_size or self.manifest.page_sizes[0]
        with open_checkpoint(path) as checkpoint:
            self.model: LoadedModel = load_model(checkpoint, self.platform, self.manifest, dtype)
        spec = StateSpec(self.model.state_layers, kv_dtype or dtype, self.page_size, seqs)
        self.state = self.platform.alloc(spec, pages)
        forward = self.model.forward
        self._bare = self.platform.compile(lambda ops, w, b: forward(_Bare(ops), w, b), self.model.weights, None)
        self._sampling = self.platform.compile(forward, self.model.weights, None)
        self.free = list(range(1, pages))
        random.Random(0).shuffle(self.free)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def logits(self, *work: tuple[int, Sequence[int]]) -> list[np.ndarray]:
        """Run one step with new tokens for some sequence slots; logits [new tokens, V] of each, in order of `work`."""
        order = sorted(range(len(work)), key=lambda i: len(work[i][1]) > 1)
        batch = self.batch([work[i] for i in order], every=True)
        out, self.state = self._bare(self.state, batch)
        rows = np.split(np.asarray(out.collect()), batch.starts[1:-1])
        cap = self.model.config.logit_softcap
        result: list[np.ndarray] = [np.empty(0)] * len(work)
        for i, values in zip(order, rows, strict=True):
            result[i] = cap * np.tanh(values / cap) if cap else values
        return result

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> np.ndarray:
        """[prompts, count] greedy tokens; every decode step takes its input from the State."""
        tokens = [self._step([(seq, prompt)])[0] for seq, prompt in enumerate(prompts, 1)]
        steps = [np.array(tokens)]
        for _ in range(count - 1):
            steps.append(self._step([(seq, [-1]) for seq in range(1, len(prompts) + 1)]))
        return np.stack(steps, axis=1)

    def _step(self, work: Sequence[tuple[int, Sequence[int]]]) -> np.ndarray:
        out, self.state = self._sampling(self.state, self.batch(work, every=False))
        return out.collect().tokens

    def batch(self, work: Sequence[tuple[int, Sequence[int]]], every: bool) -> Batch:
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
            tables.append(table)
        counts = [len(tokens) for _, tokens in work]
        starts = np.concatenate([[0], np.cumsum(counts)])
        pages = np.zeros((len(work), max(map(len, tables))), np.int32)
        for row, table in zip(pages, tables, strict=True):
            row[:len(table)] = table
        wanted = np.arange(starts[-1]) if every else starts[1:] - 1
        return Batch(*(np.asarray(a, np.int32) for a in (
            np.concatenate([list(tokens) for _, tokens in work]), np.concatenate(positions), np.concatenate(slots),
            np.repeat(np.arange(len(work)), counts), [seq for seq, _ in work], starts, lengths, pages, wanted,
            np.full(len(wanted), -1))), Sampling())
