"""Speculation with everything else on, two and two: a table of runs in which each pair of features meets.

The oracle of scheduling.py checks every token, page and slot of a run; the drafter there knows the model and is wrong
once in five tokens.
"""
from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from isthmus.core.messages import unpack_ids
from isthmus.core.scheduler import batch, scheduler
from isthmus.core.scheduler.masks import Masks
from isthmus.core.scheduler.policy import POLICIES
from isthmus.core.scheduler.request import cache_domain
from isthmus.core.speculation import settle
from isthmus.core.speculation.speculation import Speculation

from .mutants import Mutant
from .scheduling import EOS, MAX_LEN, Run
from .test_grammar_scheduler import GrammarMachine

COST = 60  # seconds
# What a request asks for, and what happens to a run.
FEATURES = ("grammar", "lora", "several", "logprobs", "prompt_logprobs", "penalties", "bias", "stop_ids",
            "stop_strings", "min_tokens", "sampling", "abort", "retraction", "chunked", "preemption", "failure",
            "small_pages", "buckets", "adaptive", "device_drafter", "no_overlap", "tree")


def covering(features: tuple[str, ...], seed: int = 0) -> list[frozenset[str]]:
    """Sets of features so that any two are together in one, and so that each is on without the other in some."""
    rng, rows = random.Random(seed), []
    open_ = {(a, b, x, y) for a, b in itertools.combinations(features, 2) for x in (0, 1) for y in (0, 1)}
    while open_:
        tries = [frozenset(f for f in features if rng.random() < 0.5) for _ in range(40)]
        best = max(tries, key=lambda on: sum((a in on) == x and (b in on) == y for a, b, x, y in open_))
        rows.append(best)
        open_ = {(a, b, x, y) for a, b, x, y in open_ if ((a in best) == x) + ((b in best) == y) < 2}
    return rows


TABLE = covering(FEATURES)


def params_of(on: frozenset[str], rng: random.Random) -> dict:
    """What a request of such a run asks for; some ask for less."""
    asks = {
        "grammar": {"grammar": rng.randrange(60)}, "logprobs": {"logprobs": 2},
        "prompt_logprobs": {"prompt_logprobs": 3},
        "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.25},
        "bias": {"logit_bias": {7: -0.5, EOS: 4.0, 1: float("-inf")}}, "stop_ids": {"stop_token_ids": (5, 9)},
        "min_tokens": {"min_tokens": 6},
        "sampling": {"temperature": 1.0, "top_p": 0.75, "top_k": 7, "min_p": 0.25, "seed": rng.randrange(9)}}
    found: dict = {"max_tokens": rng.choice((5, 12, 24))}
    for name, params in asks.items():
        if name in on and rng.random() < 0.75:
            found |= params
    return found


def build(on: frozenset[str], drafts: int) -> Run:
    page = 1 if "small_pages" in on else 4
    pages = (MAX_LEN if "retraction" in on else 4 * MAX_LEN) // page + 2
    return Run(page, pages, "priority" if "preemption" in on else "lpm", padded="buckets" in on,
               drafts=drafts and drafts + ("device_drafter" in on), adaptive="adaptive" in on,
               branches=2 * ("tree" in on), chunk=4 if "chunked" in on else 24, foresight=0, max_queued=40,
               waiting_timeout=60.0)


def drive(on: frozenset[str], seed: int = 0, drafts: int = 4, requests: int = 9) -> Run:
    """A run with these features; it ends with an empty device and every page where it was."""
    rng, run = random.Random(seed), build(on, drafts)
    shared = [rng.randrange(4) for _ in range(9)]
    domains = (b"", cache_domain(adapter=("a", 1)), cache_domain(adapter=("b", 1))) if "lora" in on else (b"",)
    for i in range(requests):
        prompt = shared[:rng.choice((0, 4, 9))] + [rng.randrange(4) for _ in range(rng.choice((2, 6, 12)))]
        params, domain = params_of(on, rng), rng.choice(domains)
        for _ in range(3 if "several" in on and i % 4 == 0 else 1):
            run.submit(prompt, domain, i % 3 if "preemption" in on else 0, **params)
        for _ in range(rng.choice((0, 1, 3))):
            run.step("no_overlap" not in on)
        running = [rid for rid, track in run.tracks.items() if not track.finish]
        if running and ("abort" in on or "stop_strings" in on and len(run.tracks[running[0]].out) > 3) and i % 3 == 0:
            run.abort(rng.choice(running))  # a stop string ends a request as an abort does, from outside
        if "failure" in on and i == requests // 2:
            run.fail_next(rng.choice(("build", "launch", "collect")))
    run.finish()
    return run


@pytest.mark.parametrize("row", range(len(TABLE)), ids=lambda row: str(row))
def test_each_pair_of_features_meets_in_a_run(row):
    run = drive(TABLE[row], row)
    stats = run.scheduler.speculation.snapshot()
    assert not run.scheduler.speculation.broken
    assert stats["accepted_tokens"] > 0 or "adaptive" in TABLE[row], (sorted(TABLE[row]), stats)


def test_the_table_has_every_pair():
    assert len(TABLE) < 16
    for a, b in itertools.combinations(FEATURES, 2):
        assert {(a in on, b in on) for on in TABLE} == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.slow
@pytest.mark.parametrize("pair", [*itertools.combinations(FEATURES, 2)], ids="+".join)
def test_each_pair_alone(pair):
    for seed in range(3):
        run = drive(frozenset(pair), seed)
        assert run.scheduler.speculation.snapshot()["accepted_tokens"] > 0 or "adaptive" in pair


def test_prefixes_are_found_as_often_as_without_drafts():
    """Conversations of several turns, each of which begins with the one before."""
    rates, texts = [], []
    for drafts in (0, 5):
        rng, run = random.Random(3), Run(4, 400, drafts=drafts, max_queued=40, chunk=16)
        talks = [[rng.randrange(4) for _ in range(6)] for _ in range(8)]
        for _ in range(4):
            ids = [run.submit(talk, max_tokens=5, ignore_eos=True, seed=1) for talk in talks]
            run.drain()
            talks = [unpack_ids(run.tracks[rid].submit.prompt).tolist() + run.tracks[rid].out + [rng.randrange(4)]
                     for rid in ids]
        run.finish()
        rates.append(run.scheduler.stats.cached_tokens / run.scheduler.stats.prompt_tokens)
        texts.append(talks)
    assert texts[0] == texts[1]
    assert rates[0] > 0.5 and abs(rates[0] - rates[1]) <= 0.01, rates


@pytest.mark.parametrize("when", range(1, 9))
def test_an_abort_at_any_moment_gives_every_page_back(when):
    """After each number of steps, with a step in flight and without."""
    for overlap in (True, False):
        run = Run(1, 80, drafts=7)
        ids = [run.submit([i, 1, 2], max_tokens=30, ignore_eos=True, temperature=1.0, seed=i) for i in range(3)]
        for _ in range(when):
            run.step(overlap)
        run.abort(*[rid for rid in ids if not run.tracks[rid].finish])
        run.finish()


def test_rejected_tokens_are_never_found_in_the_cache():
    run = Run(1, 200, drafts=7)
    for seed in range(3):
        for i in range(4):
            run.submit([i, 1, 2], max_tokens=30, ignore_eos=True, temperature=1.0, seed=seed)
        run.drain()
    texts = [unpack_ids(track.submit.prompt).tolist() + track.out for track in run.tracks.values()]
    stack = [(node, []) for node in run.cache.tree._roots[b""].children.values()]
    seen = 0
    while stack:
        node, before = stack.pop()
        path = [*before, *np.frombuffer(node.edge, np.int32).tolist()]
        assert any(text[:len(path)] == path for text in texts), f"{path} is cached, and nobody's text"
        seen += 1
        stack += [(child, path) for child in node.children.values()]
    assert seen > 8
    run.finish()


class SpeculationMachine(GrammarMachine):
    """The machine of grammars, with a drafter."""

    @initialize(page=st.sampled_from([1, 2, 4, 16]), spare=st.integers(0, 20), policy=st.sampled_from(POLICIES.names()),
                late=st.booleans(), padded=st.booleans(), drafts=st.integers(1, 7), adaptive=st.booleans())
    def begin(self, page, spare, policy, late, padded, drafts, adaptive) -> None:
        self.run = Run(page, MAX_LEN // page + 1 + spare, policy, late, padded, drafts=drafts, adaptive=adaptive)

    @rule()
    def drafter_fails(self) -> None:
        self.run.scheduler.speculation.broken = ""  # a drafter that failed is tried again, so that this ends nothing
        self.run.scheduler.speculation.drafter.fault = not self.run.scheduler.speculation.drafter.fault


TestSpeculation = SpeculationMachine.TestCase
TestSpeculation.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)


MUTANTS = [
    Mutant("a wrong draft is kept", settle, "accepted", "drafts == drawn[", "drafts >= drawn["),
    Mutant("accepted tokens fall on one place", scheduler, "settle_drafts", "known[at] + drafts.offsets[told]",
           "known[at]"),
    Mutant("the length stays behind", scheduler, "settle_drafts", "table.known[ours] = table.length[ours] =",
           "table.known[ours] ="),
    Mutant("a stop inside a draft is missed", scheduler, "settle_drafts",
           "odd[rows[table.may_stop(drawn) & given]] = True", "pass"),
    Mutant("a draft passes the end", scheduler, "settle_drafts", "known + taken >= table.end",
           "known + taken > table.end"),
    Mutant("grammars do not learn of drafts", settle, "_take_run", "said[place] != GOES_ON", "False"),
    Mutant("all places draw by one number", batch, "_sampling", "steps[-drawn:] += plan.drafts.offsets", "pass"),
    Mutant("penalties miss the draft", batch, "_drafted", "[:drafts.offsets[place]])", "[:0])"),
    Mutant("penalties see all of the draft", batch, "_drafted", "[:drafts.offsets[place]])", ")"),
    Mutant("a draft's page is one early", batch, "_more_rows", "page = places // page_size", "page = places * 0"),
    Mutant("pages of rejected tokens are lost", Speculation, "_shrink",
           "self._cache.pool.release(table.drop_pages(slot, int(keep[row])), slot)",
           "table.drop_pages(slot, int(keep[row]))"),
    Mutant("pages of rejected tokens stay", Speculation, "settled", "self._shrink(slots, self._table.known[slots])",
           "pass"),
    Mutant("drafts have no pages", Speculation, "_grow", "if not total:", "if True:"),
    Mutant("masks of a draft are one late", Masks, "walk", "bits[:count + 1]", "np.roll(bits[:count + 1], 1, 0)"),
]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_every_mutant_is_caught(mutant, monkeypatch):
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        drive(frozenset())
        test_rejected_tokens_are_never_found_in_the_cache()
        for on in (("penalties",), ("grammar",), ("sampling",), ("stop_ids",), ("small_pages",)):
            for seed in range(2):
                drive(frozenset(on), seed, requests=6)
