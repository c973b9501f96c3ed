"""Requests whose grammar is being compiled: they come to the scheduler when it is."""
from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NamedTuple

from ..errors import IsthmusError, Overloaded, RequestError, cut
from ..messages import Submit
from .contract import Grammar, GrammarError, Matcher
from .controls import controlled
from .library import Library
from .thinking import AfterThinking, words_of

PATIENCE = 30.0  # seconds for one grammar, the model's vocabulary included where it is the first


class Pending(NamedTuple):
    submit: Submit
    grammar: Future[Grammar]
    until: float


class Compiling:
    """They are taken in the order in which their grammars are ready. most: so many wait here at once."""

    def __init__(self, library: Library, most: int):
        self._library, self._most = library, most
        self._pending: dict[str, Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, submit: Submit) -> Matcher | None:
        """A matcher for the request, or None: it is kept here until `ready` gives it. Raises `RequestError`."""
        if submit.id in self._pending:
            raise ValueError(f"request id {submit.id!r} is in use")
        if submit.params.grammar is None:
            return controlled(None, submit, lambda: self._library.backend.vocabulary)
        future = self._library.ask(submit.params.grammar, submit.tenant)
        if future.done():
            return matcher_of(future, submit, self._library)
        if len(self._pending) >= self._most:
            raise Overloaded(f"{len(self._pending)} requests wait for their grammars to be compiled")
        self._pending[submit.id] = Pending(submit, future, time.monotonic() + PATIENCE)
        return None

    def ready(self, seconds: float = 0.0) -> list[tuple[Submit, Matcher | RequestError]]:
        """Those that wait no more, with a matcher or with why there is none; waits so long if there are none."""
        if not self._pending:
            return []
        if seconds:
            wait([pending.grammar for pending in self._pending.values()], seconds, FIRST_COMPLETED)
        now, found = time.monotonic(), []
        for id, pending in list(self._pending.items()):
            if pending.grammar.done():
                try:
                    found.append((pending.submit, matcher_of(pending.grammar, pending.submit, self._library)))
                except RequestError as error:
                    found.append((pending.submit, error))
            elif now > pending.until:
                found.append((pending.submit, _too_late(pending)))
            else:
                continue
            self._forget(id)
        return found

    def drop(self, ids: Iterable[str]) -> list[Submit]:
        """Forget these requests; those that were here."""
        return [self._forget(id) for id in ids if id in self._pending]

    def _forget(self, id: str) -> Submit:
        submit, future, _ = self._pending.pop(id)
        if not future.done() and all(other.grammar is not future for other in self._pending.values()):
            self._library.give_up(submit.params.grammar, future)
        return submit


def _too_late(pending: Pending) -> RequestError:
    """Whose fault it is: a grammar that was never begun has waited for others."""
    field = pending.submit.params.grammar.field
    if pending.grammar.running():
        return GrammarError(f"{field} was not compiled within {PATIENCE:g} s", field)
    return Overloaded(f"{field} has waited {PATIENCE:g} s for other grammars to be compiled", status=503)


def matcher_of(future: Future[Grammar], submit: Submit, library: Library) -> Matcher:
    """What follows a request's output. Raises `RequestError` with the reason why the grammar could not be compiled."""
    field = submit.params.grammar.field
    try:
        matcher, thinking = future.result().start(), submit.params.thinking
        if thinking is not None:
            matcher = AfterThinking(matcher, thinking, words_of(library.backend.vocabulary, thinking.ends))
        return controlled(matcher, submit, lambda: library.backend.vocabulary)
    except GrammarError as error:
        raise GrammarError(f"{field}: {error.message}", field) from error
    except RequestError:  # of a logits processor
        raise
    except Exception as error:  # a library that is not installed, or fails in a way of its own
        words = str(error) if isinstance(error, IsthmusError) else f"{type(error).__name__}: {error}"
        raise RequestError(f"{field}: structured output is not available here: {cut(words, 500)}", status=500,
                           param=field, kind="server_error") from error
