"""A grammar backend without a library: its grammars are a function of a number and of the tokens so far."""
from __future__ import annotations

from concurrent.futures import Future

import numpy as np
from isthmus.core.grammar.contract import Grammar, GrammarBackend, Matcher
from isthmus.core.messages import GrammarSpec


class Toy(Matcher, Grammar):
    """Grammar `number` over `vocab` tokens of which `eos` ends an output. After so many tokens it is complete; on the
    way every token depends on its place, the end is allowed now and then, and odd numbers force runs of tokens."""

    def __init__(self, number: int, vocab: int, eos: int, tokens: tuple[int, ...] = ()):
        self.number, self.vocab, self.eos, self.tokens = number, vocab, eos, list(tokens)
        self.most = 3 + number % 23

    def start(self) -> Toy:
        return Toy(self.number, self.vocab, self.eos)

    def clone(self) -> Toy:
        return Toy(self.number, self.vocab, self.eos, tuple(self.tokens))

    def is_complete(self) -> bool:
        return len(self.tokens) >= self.most

    def allowed(self) -> np.ndarray:
        """bool [vocab]."""
        place, allowed = len(self.tokens), np.zeros(self.vocab, bool)
        if self.is_complete():
            allowed[self.eos] = True
        elif (run := self.forced()):
            allowed[run[0]] = True
        else:
            allowed[(place + self.number) % 3::3] = True
            allowed[self.eos] = place > 1 and (place + self.number) % 4 == 0
        return allowed

    def fill(self, row: np.ndarray) -> None:
        packed = np.packbits(np.pad(self.allowed(), (0, 32 * len(row) - self.vocab)), bitorder="little")
        row[:] = packed.view("<u4")

    def forced(self) -> list[int]:
        """From every sixth place on four tokens."""
        place = len(self.tokens)
        if self.number % 2 == 0 or place % 6 < 2:
            return []
        stop = min(place - place % 6 + 6, self.most)
        run = [(7 * at + self.number) % self.vocab for at in range(place, stop)]
        return [token if token != self.eos else token + 1 for token in run]

    def accept(self, token: int) -> bool:
        fits = bool(self.allowed()[token]) and not self.is_complete()
        self.tokens.append(token)
        return fits

    def rollback(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count:]


class ToyBackend(GrammarBackend):
    """Of `Toy`. source: the number."""

    kinds = ("regex",)

    def __init__(self, vocab: int, eos: int):
        self.vocab, self.eos = vocab, eos

    def compile(self, kind: str, source: str) -> Toy:
        return Toy(int(source), self.vocab, self.eos)


class ToyLibrary:
    """As `core.grammar.library.Library`, at once."""

    compiled, seconds = 0, 0.0

    def __init__(self, vocab: int, eos: int):
        self.backend = ToyBackend(vocab, eos)

    def ask(self, spec: GrammarSpec) -> Future[Grammar]:
        future: Future[Grammar] = Future()
        future.set_result(self.backend.compile(spec.kind, spec.source))
        return future

    def forget(self, spec: GrammarSpec) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""
