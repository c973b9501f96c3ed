"""Compiled grammars of one model: made in threads beside the engine's loop, kept while they are asked for."""
from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from ..errors import IsthmusError
from ..messages import GrammarSpec
from . import PACKAGES
from .contract import BACKENDS, KINDS, Grammar, GrammarBackend, GrammarError
from .thinking import Free
from .vocabulary import Vocabulary

THREADS = 2
KEPT = 128              # grammars
KEPT_BYTES = 2**24      # of their sources
MAX_SOURCE = 2**18      # bytes of one source
TENANTS = 1024          # whose last turn is known


class _Asked(NamedTuple):
    tenant: str
    spec: GrammarSpec
    future: Future[Grammar]


class Library:
    """Grammars by what they are written in. vocabulary: makes the model's, at the first request that needs it.

    Tenants take turns and the shortest of a tenant's comes first, so that grammars which take long to compile hold up
    their own sender. Failures are not kept. `seconds` and `compiled` count what compiling took.
    """

    def __init__(self, backend: str, vocabulary: Callable[[], Vocabulary]):
        self._name, self._vocabulary = backend, vocabulary
        self._made: GrammarBackend | None = None
        self._making, self._lock = threading.Lock(), threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS, "grammar")
        self._kept: OrderedDict[tuple[str, str], Future[Grammar]] = OrderedDict()
        self._bytes = 0
        self._asked: list[_Asked] = []
        self._turns: OrderedDict[str, int] = OrderedDict()  # tenant -> the turn that was its last
        self.compiled, self.seconds = 0, 0.0

    def ask(self, spec: GrammarSpec, tenant: str = "") -> Future[Grammar]:
        """The grammar, perhaps later. The future raises `GrammarError`, or what a broken installation raises."""
        key = spec.kind, spec.source
        future = self._kept.get(key)
        if future is not None and not (future.done() and (future.cancelled() or future.exception() is not None)):
            self._kept.move_to_end(key)
            return future
        check_spec(spec)
        if future is None:
            self._bytes += len(spec.source)
        future = self._kept[key] = Future()
        with self._lock:
            self._asked.append(_Asked(tenant, spec, future))
        self._pool.submit(self._take)
        while len(self._kept) > KEPT or self._bytes > KEPT_BYTES and len(self._kept) > 1:
            self._bytes -= len(self._kept.popitem(last=False)[0][1])
        return future

    def forget(self, spec: GrammarSpec) -> None:
        """Compile it anew when it is asked for again: matchers of one grammar may share what has come to a limit."""
        if self._kept.pop((spec.kind, spec.source), None) is not None:
            self._bytes -= len(spec.source)

    def give_up(self, spec: GrammarSpec, future: Future[Grammar]) -> None:
        """Nobody waits for it any more: who sends grammars and leaves must not have others wait until all are compiled.
        One that is being compiled is kept."""
        if future.cancel() and self._kept.get((spec.kind, spec.source)) is future:
            self.forget(spec)

    @property
    def backend(self) -> GrammarBackend:
        """The backend, made at its first use: a token trie of the vocabulary takes a moment."""
        with self._making:
            if self._made is None:
                self._made = open_backend(self._name, self._vocabulary())
            return self._made

    def close(self) -> None:
        """Start nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for asked in self._asked:
            asked.future.cancel()

    def _take(self) -> None:
        """Compile the next one. There is one for each call, unless nobody waits for it any more."""
        with self._lock:
            self._asked = [asked for asked in self._asked if not asked.future.cancelled()]
            if not self._asked:
                return
            asked = min(self._asked, key=lambda one: (self._turns.get(one.tenant, 0), len(one.spec.source)))
            self._asked.remove(asked)
            self._turns[asked.tenant] = max(self._turns.values(), default=0) + 1
            self._turns.move_to_end(asked.tenant)
            if len(self._turns) > TENANTS:
                self._turns.popitem(last=False)
        if not asked.future.set_running_or_notify_cancel():
            return
        try:
            asked.future.set_result(self._compile(asked.spec))
        except BaseException as error:
            asked.future.set_exception(error)

    def _compile(self, spec: GrammarSpec) -> Grammar:
        backend = self.backend
        if spec.kind == "any":
            return Free()
        if spec.kind not in backend.kinds:
            raise GrammarError(f"the grammar backend {self._name} cannot enforce a {spec.kind}, only: "
                               f"{', '.join(backend.kinds)}; a server started with --grammar-backend llguidance can")
        began = time.perf_counter()
        try:
            return backend.compile(spec.kind, spec.source)
        finally:
            with self._lock:
                self.compiled += 1
                self.seconds += time.perf_counter() - began


def check_spec(spec: GrammarSpec) -> None:
    """Raises `GrammarError` for a kind that is none, or a source that is too long."""
    if spec.kind not in KINDS:
        raise GrammarError(f"grammars of the kind {spec.kind!r} are unknown; there are: {', '.join(KINDS)}", spec.field)
    size = len(spec.source.encode("utf-8", "surrogatepass"))
    if size > MAX_SOURCE:
        raise GrammarError(f"{spec.field} has {size} bytes, more than the {MAX_SOURCE} allowed", spec.field)


def open_backend(name: str, vocabulary: Any) -> GrammarBackend:
    """A backend by its name in the registry."""
    from importlib import import_module
    try:
        if name in PACKAGES:
            import_module(PACKAGES[name], __package__)
        return BACKENDS.create(name, vocabulary)
    except ImportError as error:
        raise IsthmusError(f"the grammar backend {name} is not installed: {error}; pip install {name}") from error
