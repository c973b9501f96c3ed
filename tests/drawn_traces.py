"""Traces drawn to defeat a policy that learns: what was true of a class of texts is so no longer, or tells nothing.

Texts are whole blocks; a step of time brings a new text, and those that are due to be asked for again.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from math import sin
from typing import Any

import numpy as np
from isthmus.core.replay.trace import Trace, make_trace

BLOCKS = 8  # of a text


class Stage:
    """Requests as they come, drawn by `rng`."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.prompts: list[list[int]] = []
        self.now = self._blocks = self._serial = 0
        self._due: list[tuple[int, int, list[int], Any]] = []
        self.texts: list[list[int]] = []     # `recency`'s, the latest last
        self.last, self.until = True, 0      # the mood of `moods`, and when it ends

    def text(self, blocks: int = BLOCKS) -> list[int]:
        """A new text."""
        self._blocks += blocks
        return list(range(self._blocks - blocks, self._blocks))

    def between(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high))

    def again(self, gap: float, text: list[int], state: Any = None) -> None:
        """It is asked for after so many steps."""
        self._serial += 1
        heappush(self._due, (self.now + int(gap), self._serial, text, state))

    def due(self) -> Iterator[tuple[list[int], Any]]:
        """One more step: what is asked for again now."""
        self.now += 1
        while self._due and self._due[0][0] <= self.now:
            yield heappop(self._due)[2:]

    def epoch(self, requests: int) -> bool:
        """Whether an even number of epochs of so many requests is over."""
        return len(self.prompts) // requests % 2 == 0


def recency(stage: Stage) -> None:
    """How many other texts came since is all that tells: least recently used is as good as it gets."""
    texts = stage.texts
    if texts and stage.rng.random() < 0.55:
        text = texts.pop(-1 - min(int(stage.rng.pareto(1.2) * 20), len(texts) - 1))
    else:
        text = stage.text()
    texts.append(text)
    del texts[:-3000]
    stage.prompts.append(text)


def heavy_tail(stage: Stage) -> None:
    """Texts of all lengths whose times between two uses have no scale."""
    for text, _ in stage.due():
        stage.prompts.append(text)
        if stage.rng.random() < 0.75:
            stage.again(stage.rng.pareto(0.6) * 4 + 1, text)
    stage.prompts.append(text := stage.text(stage.between(1, 40)))
    if stage.rng.random() < 0.75:
        stage.again(stage.rng.pareto(0.6) * 4 + 1, text)


def reversal(stage: Stage, requests: int = 1500) -> None:
    """New texts come back once and no more; then they do not come back, but those that did once go on to."""
    once = stage.epoch(requests)
    for text, uses in stage.due():
        stage.prompts.append(text)
        if not once and uses < 6:
            stage.again(stage.between(15, 60), text, uses + 1)
    stage.prompts.append(text := stage.text())
    if stage.rng.random() < (0.8 if once else 0.15):
        stage.again(stage.between(10, 50), text, 1)


def slow_reversal(stage: Stage) -> None:
    """The same as slowly as what was learned is forgotten."""
    reversal(stage, 5000)


def delay(stage: Stage) -> None:
    """Texts come back at once or never; then just when they had been given up."""
    soon = stage.epoch(3000)
    for text, _ in stage.due():
        stage.prompts.append(text)
    stage.prompts.append(text := stage.text())
    if stage.rng.random() < 0.5:
        stage.again(stage.between(2, 6) if soon else stage.between(30, 50), text)


def breath(stage: Stage) -> None:
    """The time between two uses of a text grows and shrinks for all of them."""
    gap = lambda: stage.rng.exponential(20 * (1 + 4 * abs(sin(stage.now / 2500)))) + 1  # noqa: E731
    for text, _ in stage.due():
        stage.prompts.append(text)
        if stage.rng.random() < 0.6:
            stage.again(gap(), text)
    stage.prompts.append(text := stage.text())
    if stage.rng.random() < 0.6:
        stage.again(gap(), text)


def moods(stage: Stage) -> None:
    """The second use is the last one, then the first of many, in epochs of any length."""
    if stage.now >= stage.until:
        stage.last, stage.until = not stage.last, stage.now + stage.between(300, 3000)
    for text, _ in stage.due():
        stage.prompts.append(text)
        if not stage.last and stage.rng.random() < 0.8:
            stage.again(stage.rng.geometric(0.03), text)
    stage.prompts.append(text := stage.text())
    if stage.rng.random() < (0.7 if stage.last else 0.3):
        stage.again(stage.rng.geometric(0.03), text)


def conversations(stage: Stage) -> None:
    """Conversations end after two turns; then half of them do at once, and the others go on for long."""
    short = stage.epoch(2000)
    for text, turns in stage.due():
        stage.prompts.append(text := text + stage.text(4))
        if turns < (2 if short else 12):
            stage.again(stage.between(8, 60), text, turns + 1)
    stage.prompts.append(text := stage.text(6))
    if stage.rng.random() < (0.9 if short else 0.3):
        stage.again(stage.between(8, 60), text, 1)


def loops(stage: Stage) -> None:
    """A few texts in turn, over and over, as many as the loop is drawn to have; then as many others."""
    if stage.now >= stage.until:
        stage.until = stage.now + stage.between(300, 1500)
        stage.texts = [stage.text() for _ in range(stage.between(10, 400))]
    stage.now += 1
    stage.prompts.append(stage.texts[stage.now % len(stage.texts)] if stage.rng.random() < 0.8 else stage.text())


DRAWN: dict[str, Callable[[Stage], None]] = {
    play.__name__: play for play in (recency, heavy_tail, reversal, slow_reversal, delay, breath, moods, conversations,
                                 loops)}


def drawn(name: str, requests: int, seed: int = 0) -> Trace:
    """The trace of this name."""
    stage = Stage(seed)
    while len(stage.prompts) < requests:
        DRAWN[name](stage)
    return make_trace(name, 1, ((float(i), len(text), 1, "", np.array(text, np.int32), False)
                                for i, text in enumerate(stage.prompts[:requests])))
