"""Least recently used, beside the plainest form of it: long random runs over a small tree."""
from __future__ import annotations

import random

import numpy as np
from isthmus.core.cache.radix import RadixTree

WORDS = [(a,) * 2 + (b,) * 2 + (c,) * 2 for a in range(3) for b in range(2) for c in range(2)]


def lru_run(seed: int, steps: int) -> None:
    """Insert, use, hold and let go prompts, evict now and then: the tree's victims are the model's, in order."""
    draw, tree = random.Random(seed), RadixTree(1)
    model = _Plain()
    held: list[tuple] = []
    for page in range(1, steps):
        words = draw.choice(WORDS)[:draw.randrange(1, 7)]
        key, action = np.array(words, np.int32).tobytes(), draw.randrange(8)
        if action < 3:
            pages = np.arange(page * 8, page * 8 + len(words), dtype=np.int32)
            tree.insert(key, pages)
            model.insert(words, pages.tolist())
        elif action == 3:
            found, node = tree.match(key)
            model.use(words[:found])
            assert found == model.found(words)
            if len(held) < 2 and draw.random() < 0.5:
                tree.lock(node)
                model.lock(words[:found], 1)
                held.append((node, words[:found]))
        elif action == 4 and held:
            node, words = held.pop(draw.randrange(len(held)))
            tree.unlock(node)
            model.lock(words, -1)
        elif action > 4:
            count = draw.randrange(1, 4)
            assert tree.evict(count)[::-1].tolist() == model.evict(count)
        assert tree.evictable == sum(not locks for _, locks, _ in model.cached.values())
    assert len(tree.policy._order) + len(tree.policy._bared) <= 4 * len(WORDS) * 6


class _Plain:
    """prefix -> [page, locks, stamp]."""

    def __init__(self) -> None:
        self.cached: dict[tuple, list[int]] = {}
        self.clock = 0

    def found(self, words: tuple) -> int:
        return next((n for n in range(len(words)) if words[:n + 1] not in self.cached), len(words))

    def use(self, words: tuple) -> None:
        self.clock += 1
        for n in range(len(words)):
            self.cached[words[:n + 1]][2] = self.clock

    def insert(self, words: tuple, pages: list[int]) -> None:
        for n in range(self.found(words), len(words)):
            self.cached[words[:n + 1]] = [pages[n], 0, 0]
        self.use(words)

    def lock(self, words: tuple, by: int) -> None:
        self.clock += 1
        for n in range(len(words)):
            entry = self.cached[words[:n + 1]]
            entry[1] += by
            if by < 0 and not entry[1]:
                entry[2] = self.clock

    def evict(self, count: int) -> list[int]:
        gone: list[int] = []
        while len(gone) < count:
            inner = {words[:-1] for words in self.cached}
            leaves = [words for words, (_, locks, _) in self.cached.items() if not locks and words not in inner]
            if not leaves:
                break
            gone.append(self.cached.pop(min(leaves, key=lambda words: self.cached[words][2]))[0])
        return gone
