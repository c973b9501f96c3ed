"""Grammars that wait to be compiled: who asks and leaves, or asks for much, keeps nobody else waiting."""
from __future__ import annotations

import threading
from types import SimpleNamespace

from isthmus.core.grammar import library as library_module
from isthmus.core.grammar.library import THREADS, Library
from isthmus.core.grammar.thinking import Anything
from isthmus.core.grammar.waiting import Compiling
from isthmus.core.messages import GrammarSpec, SamplingParams, Submit, pack_ids

from .effort import SOON

COST = 1  # seconds


def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled():
    library, begun, goes_on, made = Library("none", None), threading.Semaphore(0), threading.Event(), []

    def compile(kind, source):
        begun.release()
        goes_on.wait()
        made.append(source)
        return SimpleNamespace(start=Anything)
    library._made = SimpleNamespace(kinds=("regex",), compile=compile)
    waiting = Compiling(library, 100)
    sources = [f"busy {i}" for i in range(THREADS)] + ["left", "wanted"]
    submits = [Submit(f"{i} {source}", pack_ids([1]), SamplingParams(grammar=GrammarSpec("regex", source)))
               for i, source in enumerate([*sources, "wanted"])]
    assert [waiting.start(submit) for submit in submits] == [None] * len(submits)
    futures = [library.ask(GrammarSpec("regex", source)) for source in sources]
    for _ in range(THREADS):
        begun.acquire()
    dropped = waiting.drop([submit.id for submit in submits[:-1]] + ["unknown"])
    assert dropped == submits[:-1] and len(waiting) == 1
    assert futures[-2].cancelled() and not futures[-1].cancelled(), "of two that wait for one grammar one is left"
    again = library.ask(GrammarSpec("regex", "left"))
    assert again is not futures[-2]
    goes_on.set()
    again.result(), futures[-1].result()
    library._pool.shutdown()
    assert sorted(made) == sorted([*sources[:THREADS], "left", "wanted"])


def test_tenants_take_turns_and_the_shortest_of_a_tenant_comes_first(monkeypatch):
    monkeypatch.setattr(library_module, "THREADS", 1)
    library, begun, goes_on, made = Library("none", None), threading.Semaphore(0), threading.Event(), []

    def compile(kind, source):
        begun.release()
        goes_on.wait(SOON)
        made.append(f"{source[0]}{len(source)}")
        return SimpleNamespace(start=Anything)
    library._made = SimpleNamespace(kinds=("regex",), compile=compile)
    first = library.ask(GrammarSpec("regex", "first"), "many")
    assert begun.acquire(timeout=SOON)
    futures = [library.ask(GrammarSpec("regex", source), tenant) for tenant, source in (
        ("many", "a" * 50), ("many", "a" * 40), ("many", "a" * 30), ("few", "b" * 60), ("other", "c" * 70),
        ("few", "d" * 80), ("few", "left"))]
    library.give_up(GrammarSpec("regex", "left"), futures.pop())
    goes_on.set()
    assert all(future.result(SOON) for future in (first, *futures))
    assert made == ["f5", "b60", "c70", "a30", "d80", "a40", "a50"]
    library.close()
