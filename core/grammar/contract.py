"""What a grammar backend is: it compiles a grammar for a vocabulary and says which tokens may come next.

A mask row is uint32 [ceil(V / 32)], bit j of word i for token 32 * i + j, as in `core.plan.Mask`.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from ..errors import RequestError
from ..registry import Registry
from .vocabulary import Vocabulary

# What a grammar may be written in -> what its source is.
KINDS = {
    "json_object": "nothing: any JSON object",
    "json_schema": "a JSON Schema as JSON",
    "regex": "a regular expression that the whole output matches",
    "grammar": "a context-free grammar: GBNF with a rule root, or Lark with a rule start",
    "choice": "a JSON list of strings, of which the output is one",
    "any": "nothing: any text",
    "layout": "a JSON tree of texts, schemas and their repetitions, see `core.grammar.layout`",
    "structural_tag": "a JSON object of triggers and of structures with begin, schema and end; free text between them",
}
# What `GrammarBackend.accept` says of a token. FAILED: one of the grammar's limits does not let it go on.
REFUSED, GOES_ON, COMPLETE, FAILED = 0, 1, 2, 3


class GrammarError(RequestError):
    """A grammar that cannot be honoured: 400, with the keyword or the place at fault. param: the client's field."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message, param=param, code="invalid_grammar")


class Matcher(ABC):
    """How far one output has come in its grammar."""

    @abstractmethod
    def fill(self, row: np.ndarray) -> None:
        """Write the mask of the next token into `row`. A token that ends the output is allowed exactly where the
        grammar may end; of a text that is forced only the first token of `forced`, if that is not empty. Where the
        grammar has failed, for one of its limits, nothing is allowed."""

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Go on by a token; False if the grammar does not allow it, after which the matcher is of no more use."""

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Forget the last `count` accepted tokens."""

    @abstractmethod
    def forced(self) -> list[int]:
        """Tokens that must come next, spelled as the tokenizer would spell them; [] where there is a choice."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the grammar has ended, so that nothing may follow."""

    @abstractmethod
    def clone(self) -> Matcher:
        """Another one at the same place."""


class Grammar(ABC):
    """A compiled grammar. Any thread may start matchers of it."""

    @abstractmethod
    def start(self) -> Matcher:
        """A matcher at the beginning."""


class GrammarBackend(ABC):
    """Compiles grammars for one vocabulary. `compile` is called on several threads, the rest on the engine's.

    kinds: words of `KINDS` that it takes.
    """

    kinds: tuple[str, ...] = ()

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary

    @abstractmethod
    def compile(self, kind: str, source: str) -> Grammar:
        """Raises `GrammarError` that names what cannot be honoured; time and memory are bounded."""

    def fill(self, matchers: Sequence[Matcher], bits: np.ndarray) -> None:
        """The masks of all of them: bits uint32 [M, words]."""
        for matcher, row in zip(matchers, bits, strict=True):
            matcher.fill(row)

    def accept(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> np.ndarray:
        """Go on by a token each: int8 [M], `REFUSED`, `GOES_ON`, `COMPLETE` or `FAILED`."""
        return np.array([(COMPLETE if matcher.is_complete() else GOES_ON) if matcher.accept(token) else REFUSED
                         for matcher, token in zip(matchers, tokens, strict=True)], np.int8)


BACKENDS = Registry("grammar backend", GrammarBackend, ("compile",))
