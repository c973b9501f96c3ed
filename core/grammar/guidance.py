"""Grammars by the `llguidance` library: an Earley parser over derivatives of regular expressions, and a token trie.

Nothing is approximated: what the library does not know it refuses, and `schema.check` refuses what it reads otherwise.
"""
from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import numpy as np

from .contract import (
    BACKENDS,
    COMPLETE,
    FAILED,
    GOES_ON,
    KINDS,
    REFUSED,
    Grammar,
    GrammarBackend,
    GrammarError,
    Matcher,
)
from .layout import layout_to_lark
from .schema import NAMED, check, parts, spell_out
from .tags import read_tags, tags_to_lark
from .vocabulary import Vocabulary
from .words import TOO_COMPLEX, in_words, of_gbnf, reason

# Fuel of the lexer's and the parser's work: about 20 ms for a grammar and 7 ms for a token at most, see the library's
# documentation; memory of about 2 kB a state.
LIMITS = {"max_items_in_row": 2000, "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 100_000,
          "step_max_items": 25_000, "max_lexer_states": 16_384, "max_grammar_size": 200_000, "verbose_errors": False}
# Between the parts of JSON: nothing, a space, or a new line with an indent. Without a bound a model that is not sure
# what to say may write spaces for ever.
SPACES = r"( |\n[ ]{0,32}|\n\t{0,8})?"
JSON = {"whitespace_pattern": SPACES, "lenient": False, "coerce_one_of": False}
# Escapes of a regular expression: the library's are Unicode's, and models write a digit few fonts have if they may.
ASCII = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]",
         "s": r"[\t\n\v\f\r ]", "S": r"[^\t\n\v\f\r ]"}
_INSIDE = re.compile(r"\Aat \d+\(\d+\): |\n *\d+ \| start: .*\Z", re.DOTALL)  # of an error's words: the grammar around
# Characters and rules. Compiling takes longer with the square of them, a few tenths of a second with so many.
MAX_REGEX, MAX_GRAMMAR, MAX_RULES = 8192, 16_384, 400
MASKS = 2  # that are tried when a grammar is compiled: some are too complex from the second on
SEARCH = 0.2  # seconds of a thread's own time in which the part of a schema that is wrong is looked for
ENDLESS = '%llguidance {"no_forcing": true}\n'  # for a text that is forced without end
# In GBNF, a repetition at the end of a group that is repeated itself. The library would lose the group's brackets.
_REPEATED = re.compile(r'"(?:\\.?|[^"\\])*"?|\[(?:\\.?|[^\]\\])*\]?|#[^\n]*|([*+?}])(?=\s*\)[\s)]*[*+?{])', re.DOTALL)
SPELLED, MAX_SPELLED = 4096, 512  # texts whose tokens are kept, and how long they are
MAX_THREADS, ROWS = 8, 128  # that work for many rows, at the cost of more processor time; rows that are worth it


class _Words:
    """A vocabulary as the library asks for it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary):
        # The library's masks are as long as this list.
        self.tokens = vocabulary.tokens + [b""] * (vocabulary.size - len(vocabulary.tokens))
        self.special_token_ids = sorted(vocabulary.special)
        self.eos_token_id = vocabulary.eos[0]
        self._vocabulary = vocabulary
        self._spelled: dict[str | bytes, list[int]] = {}

    def __call__(self, text: str | bytes) -> list[int]:
        """Called for every text that a grammar forces, which many rows have in common."""
        ids = self._spelled.get(text)
        if ids is None:
            ids = self._vocabulary.encode(text.decode() if isinstance(text, bytes) else text)
            if len(self._spelled) >= SPELLED:
                self._spelled.clear()
            if len(text) <= MAX_SPELLED:
                self._spelled[text] = ids
        return ids


class Guided(Matcher):
    """A matcher of the library's."""

    __slots__ = ("state", "_spells")

    def __init__(self, state: llguidance.LLMatcher, spells: bool):
        self.state, self._spells = state, spells

    def fill(self, row: np.ndarray) -> None:
        self.state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self.state.is_error():  # it would allow the end
            row[:] = 0

    def accept(self, token: int) -> bool:
        return self.state.consume_token(token)

    def rollback(self, count: int) -> None:
        if not self.state.rollback(count):
            raise ValueError(f"{count} tokens cannot be taken back: {reason(self.state)}")

    def forced(self) -> list[int]:
        return self.state.compute_ff_tokens() if self._spells else []

    def is_complete(self) -> bool:
        return self.state.is_stopped() and not self.state.is_error()

    def clone(self) -> Guided:
        return Guided(self.state.deep_copy(), self._spells)


class GuidedGrammar(Grammar):
    """A compiled grammar: a matcher at its beginning, which is copied."""

    def __init__(self, first: Guided):
        self._first = first

    def start(self) -> Guided:
        return self._first.clone()


class Guidance(GrammarBackend):
    """Takes all kinds. Many rows are filled, and go on, on several threads where there are the processors for it."""

    kinds = tuple(kind for kind in KINDS if kind != "any")

    def __init__(self, vocabulary: Vocabulary):
        super().__init__(vocabulary)
        if not vocabulary.eos:
            raise GrammarError("structured output needs a token that ends an output, and this model names none")
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Words(vocabulary)), vocabulary.size,
                                                 list(vocabulary.eos))
        self._limits = llguidance.LLParserLimits(**LIMITS)
        threads = min(MAX_THREADS, (os.cpu_count() or 1) // 4)
        self._threads = llguidance.LLExecutor(threads) if threads > 1 else None

    def compile(self, kind: str, source: str) -> GuidedGrammar:
        try:
            return self._compile(kind, source)
        except GrammarError:
            if kind != "layout":
                raise
        return self._compile(kind, source, self._why_not)

    def _compile(self, kind: str, source: str, refuses: Callable[[Any], str] | None = None) -> GuidedGrammar:
        """refuses: says of each schema of a layout why it cannot be enforced."""
        first = self._first(kind, source, refuses=refuses)
        fault = self._try(first)
        if kind == "grammar" and "ff_tokens" in fault:
            first = self._first(kind, source, ENDLESS)
            fault = self._try(first)
        if fault:
            raise GrammarError(in_words(fault))
        return GuidedGrammar(first)

    def _first(self, kind: str, source: str, head: str = "", refuses: Callable[[Any], str] | None = None) -> Guided:
        """A matcher at the beginning. head: of a grammar in Lark."""
        try:
            if kind == "layout":
                state = self._begin(llguidance.LLMatcher.grammar_from_lark(
                    layout_to_lark(source, self.vocabulary.names, SPACES, refuses)))
            else:
                state = self._begin(self._grammar(kind, source, head))
        except (ValueError, TypeError, RecursionError) as error:  # what is no JSON or no Unicode
            if isinstance(error, GrammarError):
                raise
            raise GrammarError(in_words(str(error))) from error
        if state.is_error():
            raise GrammarError(self._in_place(kind, source, reason(state)))
        return Guided(state, self.vocabulary.spells)

    def _in_place(self, kind: str, source: str, words: str) -> str:
        """What the library says of a source, with the place in what the client sent."""
        if kind == "json_schema":
            return f"{self._place(check(source), words)}: {words}"
        if kind == "structural_tag":
            for i, (_, schema, _) in enumerate(read_tags(source)[0]):
                state = self._of_schema(schema)
                if state.is_error():
                    words = reason(state)
                    return f"structures[{i}].schema: {self._place(schema, words)}: {words}"
        if kind == "grammar" and "::=" in source:
            return of_gbnf(words)
        return _INSIDE.sub("", words) if kind == "regex" else words

    def _begin(self, grammar: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)

    def _try(self, first: Guided) -> str:
        """What is wrong with some masks along one way; "" for nothing."""
        matcher, row = first.clone(), np.zeros(-(-self.vocabulary.size // 32), np.uint32)
        matcher.clone().fill(row)  # what is too complex may come out once
        for _ in range(MASKS):
            matcher.fill(row)
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            bits[list(self.vocabulary.eos)] = 0
            tokens = bits.nonzero()[0]
            if len(tokens) and not matcher.accept(tokens.item(len(tokens) // 2)) or not row.any():
                return matcher.state.get_error() or "NoExtensionBias"
            if not len(tokens) or matcher.is_complete():
                break
        return ""

    def _place(self, schema: dict[str, Any], words: str) -> str:
        """Of the smallest part of a schema that is refused in these words, as far as it is found soon."""
        common = {name: schema[name] for name in NAMED[2:] if name in schema}
        until, place, within = time.thread_time() + SEARCH, "$", parts(schema, "$")
        while words != TOO_COMPLEX and time.thread_time() < until and (found := next(within, None)):
            if self._refuses({**common, **found[0]}, words):
                place, within = found[1], parts(*found)
        return place

    def _of_schema(self, schema: dict[str, Any]) -> llguidance.LLMatcher:
        return self._begin(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON))

    def _why_not(self, schema: Any) -> str:
        """Why a schema cannot be enforced; "" if it can."""
        try:
            state = self._of_schema(schema)
        except (ValueError, RecursionError) as error:
            return in_words(str(error))
        return f"{self._place(schema, reason(state))}: {reason(state)}" if state.is_error() else ""

    def _refuses(self, schema: dict[str, Any], words: str) -> bool:
        try:
            state = self._of_schema(schema)
        except (ValueError, RecursionError):
            return False
        return state.is_error() and reason(state) == words

    def fill(self, matchers: Sequence[Guided], bits: np.ndarray) -> None:
        states, start, size = [matcher.state for matcher in matchers], bits.ctypes.data, bits.strides[0]
        if self._threads is None or len(states) < ROWS:
            for i, state in enumerate(states):
                state.unsafe_compute_mask_ptr(start + i * size, size)
        else:
            self._threads.unsafe_compute_mask_ptr(list(zip(states, range(len(states)), strict=True)), start, size,
                                                  len(states))
        failed = [i for i, state in enumerate(states) if state.is_error()]
        if failed:  # they would allow the end
            bits[failed] = 0

    def accept(self, matchers: Sequence[Guided], tokens: Sequence[int]) -> np.ndarray:
        states = [matcher.state for matcher in matchers]
        if self._threads is None or len(states) < ROWS:
            taken = [state.consume_token(token) for state, token in zip(states, tokens, strict=True)]
        else:
            taken = self._threads.consume_token_par(list(zip(states, tokens, strict=True)))
        return np.array([(COMPLETE if state.is_stopped() else GOES_ON) if took else _why(state)
                         for state, took in zip(states, taken, strict=True)], np.int8)

    def _grammar(self, kind: str, source: str, head: str) -> str:
        if kind in ("json_object", "json_schema"):
            schema = {"type": "object"} if kind == "json_object" else check(source)
            return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON)
        if kind == "structural_tag":
            return llguidance.LLMatcher.grammar_from_lark(tags_to_lark(source, self.vocabulary.names, SPACES))
        if kind == "regex":
            _check_length(source, MAX_REGEX)
            return llguidance.LLMatcher.grammar_from_regex(spell_out(source, ASCII))
        if kind == "choice":
            return llguidance.LLMatcher.grammar_from_lark(
                "start: " + " | ".join(json.dumps(each) for each in json.loads(source)))
        if kind == "grammar":
            return self._context_free(source, head)
        raise GrammarError(f"grammars of the kind {kind!r} are unknown; there are: {', '.join(KINDS)}")

    @staticmethod
    def _context_free(source: str, head: str) -> str:
        _check_length(source, MAX_GRAMMAR)
        rules = source.count("::=")
        if not rules:
            if "%json" in source and re.search(r"multipleOf|\\u", source):
                raise GrammarError("multipleOf inside of %json is not supported; send the schema by itself")
            return llguidance.LLMatcher.grammar_from_lark(head + source)
        if rules > MAX_RULES:
            raise GrammarError(f"the grammar has {rules} rules, at most {MAX_RULES} are allowed")
        try:  # what converts takes long over empty lines
            source = _REPEATED.sub(lambda found: found[0] + ' ""' * bool(found[1]), re.sub(r"\n\s*\n", "\n", source))
            return head + llguidance.grammar_from("gbnf", source).removeprefix("%llguidance {}")
        except (ValueError, RecursionError, IndexError, KeyError) as error:
            raise GrammarError(in_words(str(error) or type(error).__name__)) from None


def _why(state: llguidance.LLMatcher) -> int:
    """Why a token was not taken."""
    return REFUSED if "satisfy the grammar" in state.get_error() else FAILED


def _check_length(source: str, most: int) -> None:
    if len(source) > most:
        raise GrammarError(f"{len(source)} characters are too long, at most {most} are allowed")


BACKENDS.register("llguidance", Guidance)
