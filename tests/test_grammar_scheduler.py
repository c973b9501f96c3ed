"""Grammars in the scheduler: no output leaves its grammar, whatever happens, and nothing is lost.

The oracle is in scheduling.py, the grammars are those of toy_grammar.py.
"""
from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from isthmus.core.grammar.contract import GrammarBackend
from isthmus.core.messages import TokenOutput
from isthmus.core.scheduler.masks import Masks
from isthmus.core.scheduler.policy import POLICIES
from isthmus.core.scheduler.prefill import Prefills
from isthmus.core.scheduler.request import Request
from isthmus.core.scheduler.scheduler import Scheduler

from . import scheduling
from .mutants import Mutant
from .scheduling import GRAMMARS, MAX_LEN, Run, random_run

COST = 40  # seconds


class GrammarMachine(RuleBasedStateMachine):
    """What clients, clock and device can do, with grammars and without, in one batch."""

    @initialize(page=st.sampled_from([1, 2, 4, 16]), spare=st.integers(0, 20), policy=st.sampled_from(POLICIES.names()),
                late=st.booleans(), late_masks=st.booleans(), padded=st.booleans())
    def begin(self, page: int, spare: int, policy: str, late: bool, late_masks: bool, padded: bool) -> None:
        self.run = Run(page, MAX_LEN // page + 1 + spare, policy, late, padded)
        self.run.late_masks = late_masks

    @rule(prompt=st.lists(st.integers(0, 3), min_size=1, max_size=20), grammar=st.none() | st.integers(0, 60),
          max_tokens=st.sampled_from([0, 1, 2, 5, 12, 40]), min_tokens=st.sampled_from([0, 0, 2, 6]),
          ignore_eos=st.booleans(), stop=st.sampled_from([(), (), (5, 9)]), logprobs=st.sampled_from([None, None, 1]),
          penalty=st.sampled_from([0.0, 0.0, 0.5]), temperature=st.sampled_from([0.0, 1.0]),
          copies=st.integers(1, 3), priority=st.sampled_from([0, 0, 1]))
    def submit(self, prompt: list[int], grammar: int | None, max_tokens: int, min_tokens: int, ignore_eos: bool,
               stop: tuple[int, ...], logprobs: int | None, penalty: float, temperature: float, copies: int,
               priority: int) -> None:
        for seed in range(copies):
            self.run.submit(prompt, b"", priority, grammar=grammar, max_tokens=max_tokens, min_tokens=min_tokens,
                            ignore_eos=ignore_eos, stop_token_ids=stop, logprobs=logprobs, presence_penalty=penalty,
                            temperature=temperature, seed=seed)

    @rule(count=st.integers(2, 5), length=st.integers(1, 16))
    def crowd(self, count: int, length: int) -> None:
        """Long plain requests at once: memory becomes short."""
        for i in range(count):
            self.run.submit([i] * length, max_tokens=40, ignore_eos=True)

    @precondition(lambda self: self.run.tracks)
    @rule(pick=st.integers(0, 20))
    def abort(self, pick: int) -> None:
        ids = list(self.run.tracks)
        self.run.abort(ids[-1 - pick % len(ids)])

    @rule(count=st.integers(1, 6), overlap=st.booleans())
    def steps(self, count: int, overlap: bool) -> None:
        for _ in range(count):
            self.run.step(overlap)

    @rule(kind=st.sampled_from(["build", "launch", "collect"]))
    def fail_next(self, kind: str) -> None:
        self.run.fail_next(kind)

    @rule()
    def flush(self) -> None:
        self.run.flush()

    @rule(seconds=st.sampled_from([1.0, 7.0, 21.0]))
    def wait(self, seconds: float) -> None:
        self.run.wait(seconds)

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.finish()


TestGrammars = GrammarMachine.TestCase
TestGrammars.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_random_runs():
    runs = [random_run(seed, 60, grammars=True) for seed in range(20)]
    assert sum(run.scheduler.stats.forced_tokens for run in runs) > 50, "nothing was taken without being sampled"
    assert sum(run.scheduler.stats.preemptions for run in runs) > 10, "memory was never short"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_many_random_runs(part):
    for seed in range(100):
        random_run(5000 + 100 * part + seed, 100, grammars=True)


@pytest.mark.parametrize("overlap", [True, False])
def test_forced_tokens_take_one_step_together(overlap):
    """Grammar 19 forces places 2 to 5, 8 to 11, 14 to 17 and 20 to 21 of its 22 tokens."""
    steps = {}
    for kind, more in (("taken", {}), ("sampled", {"logprobs": 0})):  # with log-probabilities each is sampled
        run = Run(pages=60)
        run.submit([1, 2], grammar=19, max_tokens=40, ignore_eos=True, **more)
        while not run.tracks["r0"].finish:
            run.step(overlap)
        run.finish()
        assert len(run.tracks["r0"].out) == 22 and run.tracks["r0"].finish == "stop"
        steps[kind] = run.launched, run.scheduler.stats.forced_tokens
    assert steps["sampled"][1] == 0 and steps["taken"][1] == 10
    assert steps["sampled"][0] - steps["taken"][0] == 10


def test_n_answers_have_places_of_their_own_and_grammars_differ_in_one_batch():
    run = Run(pages=80)
    for seed, grammar in enumerate((4, 4, 7, 10, None)):
        run.submit([1, 2, 3], grammar=grammar, temperature=1.0, seed=seed, max_tokens=20)
    run.finish()
    assert len({tuple(track.out) for track in run.tracks.values()}) == 5


@pytest.mark.parametrize(("bias", "told"), [
    ({}, (500, None, "grammar", "what the device sampled")),
    ({7: 1.0}, (400, "invalid_value", "logit_bias", "logit_bias"))])
def test_what_the_device_samples_against_the_mask_ends_the_request_alone(monkeypatch, bias, told):
    run = Run(pages=60)
    run.submit([1, 2], grammar=4, max_tokens=20, logit_bias=bias)
    run.submit([1, 3], max_tokens=20, ignore_eos=True)
    monkeypatch.setattr(scheduling, "nearest", lambda token, allowed: token)
    outputs: list[TokenOutput] = []
    run._absorb = outputs.append
    run.drain()
    ended = {output.id: output for output in outputs if output.finish}
    error = ended["r0"]
    assert (error.finish, error.status, error.code, error.param) == ("error", *told[:3]) and told[3] in error.error
    assert ("logit_bias" in error.error) == bool(bias)
    assert ended["r1"].finish == "length"


@pytest.mark.parametrize("sampled", ["any", "the end"])
def test_a_grammar_that_gets_stuck_ends_its_request_as_the_clients_fault(monkeypatch, sampled):
    """Also when what is sampled then, with no mask, is the end: it must not look like a whole sentence."""
    fill = GrammarBackend.fill

    def stuck(self, matchers, bits):
        fill(self, matchers, bits)
        for row, matcher in enumerate(matchers):
            if matcher.number == 10 and len(matcher.tokens) == 3:
                bits[row] = 0
    monkeypatch.setattr(GrammarBackend, "fill", stuck)
    if sampled == "the end":
        nearest = scheduling.nearest
        monkeypatch.setattr(scheduling, "nearest", lambda token, allowed: (
            GRAMMARS.backend.eos if allowed is not None and allowed.all() else nearest(token, allowed)))
    run = Run(pages=60)
    run.submit([1, 2], grammar=4, max_tokens=9)
    outputs: list[TokenOutput] = []
    run._absorb = outputs.append
    run.submit([1, 2], grammar=10, max_tokens=9)
    run.drain()
    ended = {output.id: output for output in outputs if output.finish}
    error = ended["r1"]
    assert (error.finish, error.status, error.code, error.param) == ("error", 400, "invalid_grammar", "grammar")
    assert "too complex to follow at token 4 of the output" in error.error and "logit_bias" not in error.error
    assert ended["r0"].finish in ("stop", "length")


@pytest.mark.parametrize("method", ["fill", "accept"])
def test_a_library_that_fails_ends_its_own_requests_and_nobody_elses(monkeypatch, method, caplog):
    class PanicException(BaseException):
        """As Rust's."""
    calls, inner = [], getattr(GrammarBackend, method)

    def fails(self, *args):
        calls.append(args)
        if len(calls) == 3:
            raise PanicException("unforeseen")
        return inner(self, *args)
    monkeypatch.setattr(GrammarBackend, method, fails)
    run = Run(pages=60)
    outputs: list[TokenOutput] = []
    run._absorb = outputs.append
    run.submit([1, 2], grammar=4, max_tokens=9)
    run.submit([1, 3], max_tokens=9, ignore_eos=True)
    run.drain()
    ended = {output.id: output for output in outputs if output.finish}
    assert ended["r0"].finish == "error" and ended["r1"].finish == "length" and "library of grammars" in caplog.text
    assert ended["r0"].status == 500 and "the library of grammars failed" in ended["r0"].error
    run.submit([1, 2], grammar=4, max_tokens=9)
    run.drain()
    assert outputs[-1].finish in ("stop", "length")


def test_masks_alternate_between_two_arrays_and_are_made_when_first_needed():
    run = Run(pages=60)
    assert not run.scheduler.masks._arrays
    run.submit([1, 2], max_tokens=3)
    run.drain()
    assert not run.scheduler.masks._arrays
    run.submit([1, 2], grammar=4, max_tokens=9)
    seen = []
    begin = run.scheduler.masks.begin

    def spy(rows, tokens, drawn):
        mask = begin(rows, tokens, drawn)
        seen.append(mask.bits)
        return mask
    run.scheduler.masks.begin = spy
    run.finish()
    assert all(not np.shares_memory(a, b) for a, b in zip(seen, seen[1:], strict=False))
    assert sum(a.nbytes for a in run.scheduler.masks._arrays) == 2 * 6 * 2 * 4  # 6 rows of 40 tokens, in words


def test_words_that_add_up_to_one_of_them_are_no_forced_token(monkeypatch):
    """Modulo 2^32: a token of each of three words is allowed, and the grammar is not asked for more."""
    masks = Masks(None, 1, 96, GRAMMARS)
    request = SimpleNamespace(matcher=SimpleNamespace(), goes_on=False)
    bits = np.zeros((1, 3), np.uint32)
    monkeypatch.setattr(GrammarBackend, "fill", lambda self, matchers, bits: bits.fill(1 << 31))
    assert masks._fill([request], bits, [0]) == [] and (bits == 1 << 31).all()


def test_only_masks_that_allow_an_end_are_looked_at_one_by_one(monkeypatch):
    """Rows whose end is to be held back are many, and few of them may end."""
    masks, looked = Masks(None, 4, 64, GRAMMARS), []
    requests = [SimpleNamespace(row=i, matcher=SimpleNamespace(forced=list), goes_on=i != 3,
                                stop_ids=(5, 40) if i % 2 else (40,)) for i in range(4)]
    rows = np.array([[1, 0], [1 << 5, 0], [0, 1 << 8], [1 << 5, 1 << 8]], np.uint32)
    monkeypatch.setattr(GrammarBackend, "fill", lambda self, matchers, bits: bits.__setitem__(slice(None), rows))
    monkeypatch.setattr(Masks, "_keep_open", lambda self, request, row, ahead: looked.append(request.row))
    masks._fill(requests, np.zeros((4, 2), np.uint32), [0, 1, 2, 3])
    assert looked == [1, 2]


MUTANTS = [
    Mutant("a matcher misses a token", Masks, "_accept", "if not request.ahead]", "if not request.ahead][1:]"),
    Mutant("masks are not filled", Masks, "_fill",
           "fill(self._backend, [r.matcher for r in requests], part)",
           "part.fill(ALL)"),
    Mutant("masks of other rows", Masks, "fill", "[requests[i] for i in live]", "[requests[-1 - i] for i in live]"),
    Mutant("an end is not held back", Masks, "_keep_open", "not held or", "True or"),
    Mutant("no end is looked for", Masks, "_keep_all_open", "may_end |=", "may_end &="),
    Mutant("another row is told to have ended", Masks, "take", "odd[rows[i]]", "odd[rows[i - 1]]"),
    Mutant("forced tokens are not told to the matcher", Request, "go_ahead", "self.matcher.accept(token)", "True"),
    Mutant("forced tokens miss the penalties", Request, "go_ahead", "self.history.add(token)", "pass"),
    Mutant("forced tokens are computed one late", Prefills, "force", "table.computed[slot] = known",
           "table.computed[slot] = known + 1"),
    Mutant("forced tokens are taken twice", Prefills, "force", "table.generation[slot] += np.uint32(1)", "pass"),
    Mutant("forced tokens pass the end", Prefills, "force", "int(table.end[slot]) - 1 - known", "10**6"),
    Mutant("forced tokens pass a stop", Prefills, "force", "tokens[:stops[0]] if stops else tokens", "tokens"),
    Mutant("forced tokens have no page", Prefills, "force", "if need > 0:", "if False:"),
    Mutant("a slot decodes and prefills", Scheduler, "fill_masks", "self._decoding[self._decoding != request.slot]",
           "self._decoding"),
    Mutant("forced tokens are not told", Scheduler, "_take", "tokens, request.ahead = request.ahead, []",
           "tokens, request.ahead = request.ahead[:1], []"),
    Mutant("a complete grammar goes on", Request, "finish_reason", "self.verdict is not None", "False"),
    Mutant("min_tokens comes before the grammar", Request, "finish_reason", " or self.matcher is not None", ""),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_caught(mutant: Mutant, monkeypatch):
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, LookupError, ValueError)):
        for seed in range(mutant.seed, mutant.seed + 40):
            random_run(seed, 80, grammars=True)


def test_the_toy_is_a_grammar():
    toy = GRAMMARS.backend.compile("regex", "19").start()
    row = np.zeros(2, np.uint32)
    tokens = []
    while not toy.is_complete():
        toy.fill(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:40].astype(bool)
        assert (bits == toy.allowed()).all()
        tokens.append(toy.forced()[0] if toy.forced() else int(np.flatnonzero(bits & (np.arange(40) != 3))[0]))
        before = toy.clone()
        assert toy.accept(tokens[-1])
        toy.rollback(1)
        assert toy.tokens == before.tokens
        toy.accept(tokens[-1])
    assert len(tokens) == toy.most == 22
