"""Drafts from a request's own prompt and output: where its last tokens stood before, what followed them then.

Source: Saxena 2023, Prompt Lookup Decoding.
"""
from __future__ import annotations

import numpy as np

from .contract import DRAFTERS, Drafter, Option, Proposals, Setup, View


class NgramDrafter(Drafter):
    """Takes the longest run of last tokens, of `least` to `longest`, that stood somewhere in the last `window` tokens,
    at its latest place."""

    options = {"least": Option(2, 1, 16, "tokens that must stand there again"),
               "longest": Option(8, 1, 64, "tokens that are compared"),
               "window": Option(32_768, 16, 1_048_576, "tokens of prompt and output that are looked through")}

    def __init__(self, setup: Setup):
        self._least, self._window = setup.options["least"], setup.options["window"]
        self._longest = max(self._least, setup.options["longest"])

    def propose(self, view: View) -> Proposals:
        found = [self._look(view.tokens[slot, max(0, known - self._window):known], most) for slot, known, most in zip(
            view.slots.tolist(), view.known.tolist(), view.most.tolist(), strict=True)]
        return Proposals(np.array([len(tokens) for tokens in found], np.int32), np.concatenate(found, dtype=np.int32))

    def _look(self, text: np.ndarray, most: int) -> np.ndarray:
        """What may follow `text`: at most `most` tokens."""
        last = len(text) - 1
        places, reached = np.flatnonzero(text[:last] == text[last]), 1  # where the last token stands, how much is alike
        while reached < self._longest and reached <= last:
            longer = places[places >= reached]
            longer = longer[text[longer - reached] == text[last - reached]]
            if not len(longer):
                break
            places, reached = longer, reached + 1
        if not len(places) or reached < self._least:
            return text[:0]
        start = int(places[-1]) + 1
        # A text that repeats itself goes on from where the copy reaches the end.
        return text[start + np.arange(most) % (last + 1 - start)]


DRAFTERS.register("ngram", NgramDrafter)
