"""What a request forbids beside its grammar: tokens that are not allowed, words, and what logits processors say.

It follows the output as a grammar does, so that masks of both are filled together, late, and recorded.
"""
from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from ..errors import RequestError
from ..messages import ControlSpec, Submit, unpack_ids
from . import thinking
from .contract import GOES_ON, GrammarBackend, Matcher
from .processors import PROCESSORS, LogitsProcessor
from .thinking import AfterThinking, Anything
from .vocabulary import Vocabulary

ALL = np.uint32(0xFFFFFFFF)
ANY, NONE = -1, -2  # in place of an id: whatever it is; no token is there

log = logging.getLogger(__name__)


def forbid(row: np.ndarray, ids: np.ndarray) -> None:
    """Clear the bits of these tokens."""
    np.bitwise_and.at(row, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))


@lru_cache(maxsize=64)
def _fixed(allowed: bytes, banned: bytes, words: int) -> np.ndarray:
    """The mask that is the same at every step."""
    row = np.full(words, ALL)
    if allowed:
        ids = unpack_ids(allowed)
        row[:] = 0
        np.bitwise_or.at(row, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    forbid(row, unpack_ids(banned))
    return row


class Phrases:
    """Sequences of at least two tokens of which the last may not come after the others."""

    def __init__(self, phrases: Sequence[bytes]):
        parts = [unpack_ids(phrase) for phrase in phrases]
        self.longest = max(len(part) - 1 for part in parts)
        self._heads = np.full((len(parts), self.longest), ANY, np.int32)
        for row, part in zip(self._heads, parts, strict=True):
            row[self.longest - len(part) + 1:] = part[:-1]
        self._last = np.array([part[-1] for part in parts], np.int32)

    def forbidden(self, output: np.ndarray) -> np.ndarray:
        """Ids that would complete a phrase."""
        tail = np.full(self.longest, NONE, np.int32)
        near = output[-self.longest:]
        tail[self.longest - len(near):] = near
        return self._last[((self._heads == tail) | (self._heads == ANY)).all(1)]


class Controlled(Matcher):
    """`inner`, and less. failed: name of a processor that raised, after which nothing is allowed."""

    def __init__(self, inner: Matcher, spec: ControlSpec, processors: Mapping[str, LogitsProcessor]):
        self.inner, self.spec, self._processors = inner, spec, processors
        self._phrases = Phrases(spec.phrases) if spec.phrases else None
        self._output, self._size = np.empty(64, np.int32), 0
        self.failed = ""

    def fill(self, row: np.ndarray) -> None:
        self.inner.fill(row)
        if self.is_fixed:
            row &= self.fixed(len(row))
        self.narrow(row)

    @property
    def is_fixed(self) -> bool:
        """Is there a mask that is the same at every step?"""
        return bool(self.spec.allowed or self.spec.banned)

    def fixed(self, words: int) -> np.ndarray:
        """That mask."""
        return _fixed(self.spec.allowed, self.spec.banned, words)

    def narrow(self, row: np.ndarray) -> None:
        """What depends on the output so far."""
        output = self._output[:self._size]
        if self._phrases is not None:
            forbid(row, self._phrases.forbidden(output))
        for name, processor in self._processors.items():
            try:
                processor.narrow(output, row)
            except Exception:
                log.exception("the logits processor %s failed", name)
                self.failed, row[:] = name, 0

    def push(self, token: int) -> None:
        """The output has one more token."""
        if self._size == len(self._output):
            self._output = np.concatenate([self._output, np.empty(self._size, np.int32)])
        self._output[self._size] = token
        self._size += 1

    def accept(self, token: int) -> bool:
        self.push(token)
        return self.inner.accept(token)

    def rollback(self, count: int) -> None:
        self.inner.rollback(count)
        self._size -= count

    def forced(self) -> list[int]:
        return []  # of what the grammar forces something may be forbidden

    def is_complete(self) -> bool:
        return self.inner.is_complete()

    def clone(self) -> Controlled:
        other = Controlled(self.inner.clone(), self.spec, self._processors)
        other._output, other._size, other.failed = self._output.copy(), self._size, self.failed
        return other

    def bias(self) -> dict[int, float]:
        """What all processors add."""
        found: dict[int, float] = {}
        for processor in self._processors.values():
            for token, value in processor.bias().items():
                found[int(token)] = found.get(int(token), 0.0) + float(value)
        return found


def controlled(inner: Matcher | None, submit: Submit, vocabulary: Callable[[], Vocabulary]) -> Matcher | None:
    """The matcher of a request's grammar, if it has one, under its controls, if it has any. Raises `RequestError` for
    arguments that a processor refuses."""
    spec = submit.params.controls
    if spec is None:
        return inner
    processors = {}
    for place, (name, arguments) in enumerate(spec.processors):
        field = f"logits_processors[{place}]"
        try:
            processors[name] = PROCESSORS.create(name, json.loads(arguments), unpack_ids(submit.prompt), vocabulary)
        except ValueError as error:
            raise RequestError(f"{field}: {error}", param=field, code="invalid_value") from None
        except Exception as error:
            log.exception("the logits processor %s failed", name)
            raise RequestError(f"{field}: the processor {name} failed", status=500, param=field,
                               kind="server_error") from error
    return Controlled(inner if inner is not None else Anything(), spec, processors)


def biased(submit: Submit, matcher: Any) -> Submit:
    """The request with what its processors add to logits."""
    more = matcher.bias() if isinstance(matcher, Controlled) else {}
    if not more:
        return submit
    bias = dict(submit.params.logit_bias)
    for token, value in more.items():
        bias[token] = bias.get(token, 0.0) + value
    if any(value != value for value in bias.values()):
        raise RequestError("logits_processors: a bias is not a number", status=500, param="logits_processors",
                           kind="server_error")
    return msgspec.structs.replace(submit, params=msgspec.structs.replace(submit.params, logit_bias=bias))


def _are_grammars(matchers: Sequence[Matcher]) -> bool:
    """Whether all are the backend's own, as nearly always: one look at hundreds of them."""
    return {Controlled, Anything, AfterThinking}.isdisjoint(map(type, matchers))


def fill(backend: Callable[[], GrammarBackend], matchers: Sequence[Matcher], bits: np.ndarray) -> None:
    """The masks of all of them: bits uint32 [M, words]. backend: asked for only where a grammar is."""
    if _are_grammars(matchers):
        backend().fill(matchers, bits)
        return
    inner = [m.inner if isinstance(m, Controlled) else m for m in matchers]
    bound = [i for i, matcher in enumerate(inner) if not isinstance(matcher, Anything)]
    if len(bound) == len(inner):
        thinking.fill(backend(), inner, bits)
    else:
        bits[:] = ALL
        if bound:
            part = np.empty((len(bound), bits.shape[1]), np.uint32)
            thinking.fill(backend(), [inner[i] for i in bound], part)
            bits[bound] = part
    own = [i for i, matcher in enumerate(matchers) if isinstance(matcher, Controlled)]
    fixed = [i for i in own if matchers[i].is_fixed]
    if fixed:
        bits[fixed] &= np.stack([matchers[i].fixed(bits.shape[1]) for i in fixed])
    for i in own:
        matchers[i].narrow(bits[i])


def accept(backend: Callable[[], GrammarBackend], matchers: Sequence[Matcher], tokens: Sequence[int]) -> np.ndarray:
    """What `GrammarBackend.accept` says, of all of them: int8 [M]."""
    if _are_grammars(matchers):
        return backend().accept(matchers, tokens)
    said = np.full(len(matchers), GOES_ON, np.int8)
    inner = [m.inner if isinstance(m, Controlled) else m for m in matchers]
    bound = [i for i, matcher in enumerate(inner) if not isinstance(matcher, Anything)]
    if bound:
        said[bound] = thinking.accept(backend(), [inner[i] for i in bound], [tokens[i] for i in bound])
    for matcher, token in zip(matchers, tokens, strict=True):
        if isinstance(matcher, Controlled):
            matcher.push(token)
    return said
