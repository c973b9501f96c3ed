"""A grammar that holds after the model's thinking, and the thinking's budget. Any backend's grammars can follow.

The thinking's end is found in the text, as the parsers of replies find it, whatever tokens spell it.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ..messages import ThinkingSpec, unpack_ids
from .contract import COMPLETE, GOES_ON, REFUSED, Grammar, GrammarBackend, Matcher
from .vocabulary import Vocabulary

ALL = np.uint32(0xFFFFFFFF)
WHITE = b" \t\r\n"
BLANKS = 4      # tokens of white space between the thinking and what follows
KEPT = 256      # tokens that can be taken back
# Before it may begin; in its opening; in it; while its end is written; right behind it; past it.
START, OPENING, INSIDE, STOPPING, GAP, PAST = range(6)


class Anything(Matcher):
    """Allows all: for thinking without a grammar behind it."""

    def fill(self, row: np.ndarray) -> None:
        row[:] = ALL

    def accept(self, token: int) -> bool:
        return True

    def rollback(self, count: int) -> None:
        """Nothing is remembered."""

    def forced(self) -> list[int]:
        return []

    def is_complete(self) -> bool:
        return False

    def clone(self) -> Anything:
        return self


class Free(Grammar):
    """The kind "any"."""

    def start(self) -> Anything:
        return Anything()


@lru_cache(maxsize=64)
def _bits(ids: tuple[int, ...], words: int) -> np.ndarray:
    row = np.zeros(words, np.uint32)
    np.bitwise_or.at(row, np.array(ids, np.int64) >> 5, np.uint32(1) << (np.array(ids, np.uint32) & np.uint32(31)))
    return row


class Words:
    """What a notation of thinking needs to know of a vocabulary: tokens of white space, and those that would end the
    thinking and go on, of which a grammar would not see the rest."""

    def __init__(self, vocabulary: Vocabulary, ends: tuple[str, ...]):
        self.vocabulary, self.ends = vocabulary, tuple(end.encode() for end in ends)
        self.longest = max(map(len, self.ends), default=0)
        self.blank = tuple(i for i, piece in enumerate(vocabulary.tokens) if piece and not piece.strip(WHITE))
        last = {end[-1:] for end in self.ends}
        self._longer = [(i, piece) for i, piece in enumerate(vocabulary.tokens)
                        if any(sign in piece and piece.partition(sign)[2].strip(WHITE) for sign in last)]
        self._beyond: dict[bytes, tuple[int, ...]] = {}

    def beyond(self, tail: bytes) -> tuple[int, ...]:
        """Tokens that complete an end behind `tail` with more than white space after it."""
        begun = [end[size:] for end in self.ends for size in range(len(end)) if tail.endswith(end[:size])]
        return tuple(i for rest in dict.fromkeys(begun) for i in self._past(rest))

    def _past(self, rest: bytes) -> tuple[int, ...]:
        """Tokens that go on behind what is left of an end. Only the whole of one may begin within a token."""
        if rest not in self._beyond:
            found = [(i, piece.find(rest)) for i, piece in self._longer]
            self._beyond[rest] = tuple(
                i for i, place in found if (place == 0 or place > 0 and rest in self.ends)
                and self.vocabulary.tokens[i][place + len(rest):].strip(WHITE))
        return self._beyond[rest]


@lru_cache(maxsize=16)
def words_of(vocabulary: Vocabulary, ends: tuple[str, ...]) -> Words:
    """Made once for each notation."""
    return Words(vocabulary, ends)


class AfterThinking(Matcher):
    """`inner` from where the thinking has ended; before it the model writes what it likes, but not the end of the
    output where a grammar waits for its turn.

    If the thinking is not open yet, the model chooses: it opens it or begins with `inner`. After `budget` tokens of
    thinking its end is written for it.
    """

    def __init__(self, inner: Matcher, spec: ThinkingSpec, words: Words):
        self.inner, self._spec, self._words = inner, spec, words
        self._begin, self._stop = unpack_ids(spec.begin).tolist(), unpack_ids(spec.stop).tolist()
        self._state = INSIDE if spec.opened else START if self._begin else PAST
        self._tail, self._count, self._place = b"", 0, 0
        self._past: deque[tuple[int, bytes, int, int]] = deque(maxlen=KEPT)
        self._taken: deque[bool] = deque(maxlen=KEPT)  # whether `inner` has this token
        self._check_budget()

    def fill(self, row: np.ndarray) -> None:
        if self._state in (OPENING, STOPPING):
            row[:] = 0
            self._allow(row, (self._next(),))
        elif self._state == INSIDE:
            row[:] = ALL
            if not isinstance(self.inner, Anything):
                row &= ~_bits((*self._words.vocabulary.eos, *self._words.beyond(self._tail)), len(row))
        else:
            self.inner.fill(row)
            if self._state == START and (len(self._begin) == 1 or not self._has(row, self._begin[0])):
                self._allow(row, (self._begin[0],))
            if self._state == GAP:
                self._allow(row, self._words.blank)

    def accept(self, token: int) -> bool:
        self._past.append((self._state, self._tail, self._count, self._place))
        taken = False
        if self._state in (OPENING, STOPPING):
            if token != self._next():
                return False
            self._place += 1
            if self._place == len(self._begin if self._state == OPENING else self._stop):
                self._state, self._place = (INSIDE, 0) if self._state == OPENING else (GAP, 0)
                self._check_budget()
        elif self._state == INSIDE:
            self._think(token)
        elif self._state == START and token == self._begin[0] and self._opens():
            self._state, self._place = (INSIDE, 0) if len(self._begin) == 1 else (OPENING, 1)
            self._check_budget()
        elif self._state == GAP and token in self._words.blank and not self._inner_takes(token):
            self._place += 1
            if self._place == BLANKS:
                self._state = PAST
        else:
            taken, self._state = True, PAST
            if not self.inner.accept(token):
                return False
        self._taken.append(taken)
        return True

    def rollback(self, count: int) -> None:
        if count > len(self._past):
            raise ValueError(f"{count} tokens cannot be taken back, only {len(self._past)}")
        for _ in range(count):
            self._state, self._tail, self._count, self._place = self._past.pop()
            if self._taken.pop():
                self.inner.rollback(1)

    def forced(self) -> list[int]:
        if self._state == OPENING:
            return self._begin[self._place:]
        if self._state == STOPPING:
            return self._stop[self._place:]
        return self.inner.forced() if self._state == PAST else []

    def is_complete(self) -> bool:
        return self._state in (GAP, PAST) and self.inner.is_complete()

    def clone(self) -> AfterThinking:
        other = AfterThinking(self.inner.clone(), self._spec, self._words)
        other._state, other._tail, other._count, other._place = self._state, self._tail, self._count, self._place
        other._past, other._taken = self._past.copy(), self._taken.copy()
        return other

    @property
    def is_past(self) -> bool:
        """Whether `inner` alone decides from here on."""
        return self._state == PAST

    def _think(self, token: int) -> None:
        tokens = self._words.vocabulary.tokens
        text = self._tail + (tokens[token] if token < len(tokens) else b"")
        self._count += 1
        if any(end in text for end in self._words.ends):
            self._state, self._tail, self._place = GAP, b"", 0
            return
        self._tail = text[-self._words.longest:]
        self._check_budget()

    def _check_budget(self) -> None:
        if self._state == INSIDE and 0 <= self._spec.budget <= self._count and self._stop:
            self._state, self._place = STOPPING, 0

    def _next(self) -> int:
        return (self._begin if self._state == OPENING else self._stop)[self._place]

    def _opens(self) -> bool:
        """Whether the first token of the opening opens, though the grammar may begin with it too."""
        return len(self._begin) == 1 or not self._inner_takes(self._begin[0])

    def _inner_takes(self, token: int) -> bool:
        return self.inner.clone().accept(token)

    @staticmethod
    def _allow(row: np.ndarray, ids: tuple[int, ...]) -> None:
        row |= _bits(ids, len(row))

    @staticmethod
    def _has(row: np.ndarray, token: int) -> bool:
        return bool(row.item(token >> 5) >> (token & 31) & 1)


def fill(backend: GrammarBackend, matchers: Sequence[Matcher], bits: np.ndarray) -> None:
    """The masks of all of them, most by the backend together: bits uint32 [M, words]."""
    own = [i for i, matcher in enumerate(matchers) if isinstance(matcher, AfterThinking)]
    if not own:
        backend.fill(matchers, bits)
        return
    for i in own:
        matchers[i].fill(bits[i])
    rest = [i for i, matcher in enumerate(matchers) if not isinstance(matcher, AfterThinking)]
    if rest:
        part = np.empty((len(rest), bits.shape[1]), np.uint32)
        backend.fill([matchers[i] for i in rest], part)
        bits[rest] = part


def accept(backend: GrammarBackend, matchers: Sequence[Matcher], tokens: Sequence[int]) -> np.ndarray:
    """What `GrammarBackend.accept` says, of all of them: int8 [M]."""
    own = [i for i, matcher in enumerate(matchers) if isinstance(matcher, AfterThinking)]
    if not own:
        return backend.accept(matchers, tokens)
    said = np.full(len(matchers), GOES_ON, np.int8)
    for i in own:
        said[i] = _accept(backend, matchers[i], tokens[i])
    rest = [i for i, matcher in enumerate(matchers) if not isinstance(matcher, AfterThinking)]
    if rest:
        said[rest] = backend.accept([matchers[i] for i in rest], [tokens[i] for i in rest])
    return said


def _accept(backend: GrammarBackend, matcher: AfterThinking, token: int) -> int:
    if matcher.is_past and not isinstance(matcher.inner, Anything):
        return int(backend.accept([matcher.inner], [token])[0])
    if not matcher.accept(token):
        return REFUSED
    return COMPLETE if matcher.is_complete() else GOES_ON


