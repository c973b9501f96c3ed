"""Schemas by the `xgrammar` library: an automaton with a stack, whose masks are kept once they were made.

The library reads JSON Schemas with less than they say, so it is given none: they are written as rules first
(`ebnf.py`), or refused. It has no limits of its own either, and some texts of a few characters would keep it busy for
minutes, so it is given no grammar and no regular expression that a client wrote. Importing it imports torch.
"""
from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import cut
from .contract import BACKENDS, COMPLETE, GOES_ON, REFUSED, Grammar, GrammarBackend, GrammarError, Matcher
from .ebnf import JSON, schema_to_gbnf
from .patterns import literal
from .vocabulary import Vocabulary
from .words import TOO_COMPLEX

_WHERE = re.compile(r"\A.*?\.cc:\d+: ", re.DOTALL)  # of an error's words
KEPT = 2**26  # bytes of masks that grammars have in common
MASKS, SECONDS = 2, 0.25  # that are tried when a grammar is compiled, and a thread's own time that each may take


class Stacked(Matcher):
    """A matcher of the library's. ends, every: masks of the tokens that end an output, and of all that there are."""

    __slots__ = ("state", "_ends", "_every")

    def __init__(self, state: Any, ends: np.ndarray, every: np.ndarray):
        self.state, self._ends, self._every = state, ends, every

    def fill(self, row: np.ndarray) -> None:
        row[:] = self._every  # the library leaves a mask that allows all as it was, and may set bits of no token
        if self.state.is_terminated():
            row[:] = self._ends
        else:
            self.state.fill_next_token_bitmask(row.view(np.int32).reshape(1, -1))
            row &= self._every

    def accept(self, token: int) -> bool:
        return not self.state.is_terminated() and self.state.accept_token(int(token))

    def rollback(self, count: int) -> None:
        self.state.rollback(count)

    def forced(self) -> list[int]:
        return []  # the mask allows any spelling of what is forced, and the contract has one only

    def is_complete(self) -> bool:
        if self.state.is_terminated():
            return True
        if not self.state.is_completed():
            return False
        row = np.empty_like(self._ends)
        self.fill(row)
        return not (row & ~self._ends).any()

    def clone(self) -> Stacked:
        return Stacked(self.state.fork(), self._ends, self._every)


class StackedGrammar(Grammar):
    """A compiled grammar."""

    def __init__(self, library: ModuleType, compiled: Any, ends: np.ndarray, every: np.ndarray):
        self._library, self._compiled, self._ends, self._every = library, compiled, ends, every

    def start(self) -> Stacked:
        return Stacked(self._library.GrammarMatcher(self._compiled), self._ends, self._every)


class XGrammar(GrammarBackend):
    """Takes JSON and choices; tools that must be called and structural tags need another backend."""

    kinds = ("json_object", "json_schema", "choice")

    def __init__(self, vocabulary: Vocabulary):
        super().__init__(vocabulary)
        import xgrammar  # an extra, and slow to import
        self._library = xgrammar
        if not vocabulary.eos:
            raise GrammarError("structured output needs a token that ends an output, and this model names none")
        tokens = [b"" if i in vocabulary.special else token for i, token in enumerate(vocabulary.tokens)]
        info = xgrammar.TokenizerInfo(tokens, vocab_size=vocabulary.size, stop_token_ids=list(vocabulary.eos))
        # Masks are made when they are first needed: to make all of them at once takes a thread as long as it may.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=KEPT,
                                                  enable_dynamic_compilation=True)
        self._ends, self._every = _mask(vocabulary.eos, vocabulary.size), _mask(range(vocabulary.size), vocabulary.size)

    def compile(self, kind: str, source: str) -> StackedGrammar:
        write = {"json_object": lambda _: f"root ::= object\n{JSON}", "json_schema": schema_to_gbnf,
                 "choice": lambda texts: "root ::= " + " | ".join(map(literal, json.loads(texts)))}[kind]
        try:
            rules = write(source)
        except RecursionError:  # long names, or references from one to the next
            raise GrammarError(TOO_COMPLEX) from None
        try:
            compiled = self._compiler.compile_grammar(self._library.Grammar.from_ebnf(rules))
            grammar = StackedGrammar(self._library, compiled, self._ends, self._every)
            fault = self._try(grammar.start())
        except (RuntimeError, ValueError) as error:
            raise GrammarError(_in_words(str(error))) from None
        if fault:
            raise GrammarError(fault)
        return grammar

    def _try(self, matcher: Stacked) -> str:
        """What is wrong with some masks along one way; "" for nothing."""
        row = np.empty_like(self._ends)
        for _ in range(MASKS):
            began = time.thread_time()
            matcher.fill(row)
            if not row.any():
                return "no text satisfies it"
            if time.thread_time() - began > SECONDS:
                return TOO_COMPLEX
            tokens = np.flatnonzero(np.unpackbits((row & ~self._ends).view(np.uint8), bitorder="little"))
            if not len(tokens) or not matcher.accept(tokens.item(len(tokens) // 2)):
                break
        return ""

    def fill(self, matchers: Sequence[Stacked], bits: np.ndarray) -> None:
        for matcher, row in zip(matchers, bits, strict=True):
            matcher.fill(row)

    def accept(self, matchers: Sequence[Stacked], tokens: Sequence[int]) -> np.ndarray:
        return np.array([(COMPLETE if matcher.is_complete() else GOES_ON) if matcher.accept(token) else REFUSED
                         for matcher, token in zip(matchers, tokens, strict=True)], np.int8)


def _mask(ids: Sequence[int], size: int) -> np.ndarray:
    bits = np.zeros(-(-size // 32) * 32, bool)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view("<u4")


def _in_words(text: str) -> str:
    """What the library says, without where in its own source it says so."""
    return cut(_WHERE.sub("", text.strip()), 500) or "the library failed on it"


BACKENDS.register("xgrammar", XGrammar)
