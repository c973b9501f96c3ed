"""Drafts from all text that requests have left in the cache: what followed a request's last tokens there.

An index of suffixes: the last tokens of each place, hashed, name the latest place where they stood. Requests of one
cache domain never see text of another. The text outlives its pages, until newer text takes its room or the cache is
flushed. Source: Oliaro et al. 2024, SuffixDecoding, with a hash of the last tokens in place of a tree.
"""
from __future__ import annotations

import numpy as np

from .contract import DRAFTERS, Drafter, Option, Proposals, Setup, View
from .ngram import NgramDrafter

RUNS = (12, 4)        # last tokens that are looked up, the longer run first
NOBODY, END = -1, -1  # domain of a place without text; what stands behind each text
DOMAINS = 4096        # told apart at once
_BASE = np.uint64(0x9E3779B97F4A7C15)


class SuffixDrafter(Drafter):
    """What stands behind a run of 12 last tokens in the corpus, or what the request's own text says where that is more;
    behind a run of 4 where there is neither."""

    options = {"corpus": Option(1_048_576, 1024, 268_435_456, "tokens of text that are kept"),
               **NgramDrafter.options}

    def __init__(self, setup: Setup):
        self._own, self._size = NgramDrafter(setup), setup.options["corpus"]
        places = 1 << (2 * self._size - 1).bit_length()
        self._mask = np.uint64(places - 1)
        self._index = {run: np.zeros(places, np.int32) for run in RUNS}
        self.flushed()

    def flushed(self) -> None:
        self._text, self._domain = np.full(self._size, END, np.int32), np.full(self._size, NOBODY, np.int32)
        self._domains: dict[bytes, int] = {}
        self._at = 0

    def propose(self, view: View) -> Proposals:
        counts, tokens = self._own.propose(view)
        own, domains = np.split(tokens, np.cumsum(counts)[:-1]), self._numbers(view)
        reached = [self._look(view, domains, run) for run in RUNS]
        for row, most in enumerate(view.most.tolist()):
            place = reached[0][row] if reached[0][row] >= 0 or counts[row] else reached[1][row]
            draft = self._from(place + 1, most) if place >= 0 else own[row]
            if len(draft) > counts[row]:
                own[row], counts[row] = draft, len(draft)
        return Proposals(counts, np.concatenate(own, dtype=np.int32))

    def left(self, slot: int, tokens: np.ndarray, cached: int, domain: bytes) -> None:
        """Take in what is new of a request's text, behind enough of the old to find it by."""
        new = tokens[max(0, cached - RUNS[0]):][-self._size + 1:]
        if len(new) <= RUNS[-1]:
            return
        if domain not in self._domains:
            if len(self._domains) == DOMAINS:
                self.flushed()
            self._domains[domain] = len(self._domains)
        places = (self._at + np.arange(len(new) + 1)) % self._size
        self._text[places[:-1]], self._domain[places[:-1]] = new, self._domains[domain]
        self._text[places[-1]], self._domain[places[-1]] = END, NOBODY
        self._at = (int(places[-1]) + 1) % self._size
        for run, index in self._index.items():
            if len(new) >= run:
                windows = np.lib.stride_tricks.sliding_window_view(new, run)
                index[self._hash(windows, self._domains[domain])] = places[run - 1:-1]

    # ---- inside

    def _numbers(self, view: View) -> np.ndarray:
        """Each request's domain as a number that the corpus has, or NOBODY."""
        return np.array([self._domains.get(domain, NOBODY) for domain in view.domains], np.int32)

    def _hash(self, runs: np.ndarray, domains: np.ndarray | int) -> np.ndarray:
        """Where runs of tokens [n, run] are in the index: uint64 [n]."""
        with np.errstate(over="ignore"):
            found = np.full(len(runs), 1, np.uint64) + np.asarray(domains).astype(np.uint64)
            for column in runs.T:
                found = (found ^ column.astype(np.uint64)) * _BASE
                found ^= found >> np.uint64(29)
        return found & self._mask

    def _look(self, view: View, domains: np.ndarray, run: int) -> np.ndarray:
        """Where the last `run` tokens of each request stand in its domain's text, by their last one; -1 = nowhere."""
        known = view.known
        last = view.tokens[view.slots[:, None], np.maximum(known[:, None] - run + np.arange(run), 0)]
        places = self._index[run][self._hash(last, domains)].astype(np.int64)
        there = (places[:, None] - run + 1 + np.arange(run)) % self._size
        same = (self._text[there] == last).all(1) & (self._domain[there] == domains[:, None]).all(1)
        return np.where(same & (domains != NOBODY) & (known >= run), places, -1)

    def _from(self, place: int, most: int) -> np.ndarray:
        """What stands from a place of the corpus on, up to the end of its text."""
        text = self._text[(place + np.arange(most)) % self._size]
        ends = np.flatnonzero(text == END)
        return text[:ends[0]] if len(ends) else text


DRAFTERS.register("suffix", SuffixDrafter)
