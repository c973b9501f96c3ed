"""The scheduler by example: chunks, cache hits, retraction, endings, errors and counters with exact numbers."""
from __future__ import annotations

import itertools

import numpy as np
import pytest
from isthmus.core.cache.manager import CacheManager
from isthmus.core.errors import Overloaded, RequestError
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.scheduler.admission import Limits, check_request
from isthmus.core.scheduler.request import History, cache_domain
from isthmus.core.scheduler.scheduler import Scheduler
from isthmus.core.scheduler.stats import SchedulerStats
from isthmus.core.scheduler.table import uniforms

from .scheduling import EOS, VOCAB, Run

LIMITS = Limits(max_running=4, max_queued=2, chunk=12, page_size=4, max_model_len=48, vocab_size=VOCAB, eos_ids=(EOS,))
LONG = {"ignore_eos": True}


def submit_of(prompt, id="x", **params) -> Submit:
    return Submit(id, pack_ids(prompt), SamplingParams(**params))


def ranges(run: Run) -> list[tuple[int, int, int, bool]]:
    """(request, start, stop, sample) of the step in flight, as it was planned."""
    plan = run.flight[0]
    decode = [(int(s), int(run.scheduler.table.length[s]) - 2, int(run.scheduler.table.length[s]) - 1, True)
              for s in plan.decode]
    return decode + [(c.slot, c.start, c.stop, c.sample) for c in plan.chunks]


# ---- admission

@pytest.mark.parametrize(("prompt", "params", "param", "words"), [
    ([], {}, "prompt", "the prompt is empty"),
    ([1, VOCAB], {}, "prompt", f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
    ([1, -1], {}, "prompt", "token id -1 is outside"),
    ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias", f"logit_bias: token id {VOCAB} is outside"),
    ([1], {"stop_token_ids": (-5,)}, "stop_token_ids", "stop_token_ids: token id -5 is outside"),
    ([1], {"logprobs": 21}, "logprobs", "logprobs 21 is outside 0 to 20"),
    ([1], {"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs -1 is outside 0 to 20"),
    ([1], {"max_tokens": -1}, "max_tokens", "max_tokens -1 is below 0"),
    ([1] * 48, {}, "prompt", "the prompt has 48 tokens and the context is 48 tokens"),
    ([1] * 49, {"max_tokens": 0}, "prompt", "the prompt has 49 tokens"),
])
def test_impossible_requests_are_refused_with_the_number(prompt, params, param, words):
    with pytest.raises(RequestError, match=words) as caught:
        check_request(submit_of(prompt, **params), LIMITS)
    assert caught.value.param == param and caught.value.status == 400
    assert (caught.value.code == "context_length_exceeded") == (len(prompt) >= 48)


@pytest.mark.parametrize(("prompt_len", "max_tokens", "most"), [(1, 16, 16), (40, 16, 8), (47, 1, 1), (48, 0, 0)])
def test_output_is_limited_by_the_context(prompt_len, max_tokens, most):
    assert check_request(submit_of([1] * prompt_len, max_tokens=max_tokens), LIMITS) == most


def test_a_full_queue_says_so():
    scheduler = Scheduler(LIMITS, CacheManager(20, 4, strict=True))
    scheduler.submit(submit_of([1], "a"), 0.0)
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        scheduler.submit(submit_of([1], "a"), 0.0)
    for rid in "bcdef":                                    # 4 slots are free, and 2 may wait
        scheduler.submit(submit_of([1], rid), 0.0)
    with pytest.raises(Overloaded, match="2 requests are waiting for a place, the limit is 2") as caught:
        scheduler.submit(submit_of([1], "g"), 0.0)
    assert caught.value.status == 429
    scheduler.abort(["a"])
    scheduler.submit(submit_of([1], "a"), 0.0)             # an id is free again once its request has ended
    assert [o.id for o in scheduler.ended()] == ["a"] and scheduler.waiting == 6


def test_a_burst_loses_nothing_while_slots_are_free_and_slots_without_memory_do_not_count():
    run = Run(pages=100, max_running=4, max_queued=1)
    assert all(run.submit([i, 2, 3], max_tokens=3) for i in range(5)) and run.submit([9], max_tokens=1) is None
    run.finish()
    assert all(run.submit([i, 2, 3], max_tokens=3) for i in range(5)), "and again when all have ended"
    run.finish()
    short = Run(pages=12, max_running=4, max_queued=1, max_model_len=44, chunk=36)
    short.submit([*range(36)], max_tokens=8, ignore_eos=True)
    short.step()
    short.submit([*range(36, 0, -1)], max_tokens=8)
    short.step()                                           # it finds 3 free slots and no memory
    assert short.scheduler.running == 1 and short.scheduler.table.free == 3
    assert short.submit([1], max_tokens=1) is None
    short.finish()
    assert all(short.submit([i], max_tokens=1) for i in range(5))
    short.finish()


def test_a_request_larger_than_the_memory_ends_with_the_numbers():
    scheduler = Scheduler(LIMITS, CacheManager(5, 4, strict=True))
    scheduler.submit(submit_of([1] * 17, max_tokens=4), 0.0)
    assert scheduler.plan(0.0) is None
    (output,) = scheduler.ended()
    assert output.finish == "error"
    assert output.error == "out of KV memory: the request needs 5 pages, 4 of 4 can be had"
    scheduler.verify()


# ---- prefill and decode

def test_a_long_prompt_is_cut_into_chunks_and_decodes_on():
    run = Run(chunk=12)
    run.submit([*range(30)], max_tokens=3, **LONG)
    seen = []
    for _ in range(5):
        run.step()
        seen += ranges(run)
    assert seen == [(1, 0, 12, False), (1, 12, 24, False), (1, 24, 30, True), (1, 30, 31, True), (1, 31, 32, True)]
    run.finish()
    assert run.tracks["r0"].finish == "length" and len(run.tracks["r0"].out) == 3


def test_decode_comes_before_prefill_and_costs_it_nothing():
    run = Run(chunk=12, page=4)
    run.submit([1, 2, 3], max_tokens=9, **LONG)
    run.step()
    run.submit([*range(10, 30)], max_tokens=2, **LONG)
    run.step()
    assert ranges(run) == [(1, 3, 4, True), (2, 0, 12, False)]
    run.step()
    assert ranges(run) == [(1, 4, 5, True), (2, 12, 20, True)]
    run.finish()


def test_the_budget_is_shared_by_several_prompts():
    run = Run(chunk=12)
    for first in (0, 10, 20):
        run.submit([*range(first, first + 5)], max_tokens=1)
    run.step()
    assert ranges(run) == [(1, 0, 5, True), (2, 0, 5, True), (3, 0, 2, False)]
    run.step()
    assert ranges(run) == [(3, 2, 5, True)]
    run.finish()


def test_rows_of_one_token_come_first():
    run = Run(chunk=12)
    run.submit([1, 2, 3], max_tokens=1)
    run.submit([4], max_tokens=1)
    run.step()
    assert ranges(run) == [(2, 0, 1, True), (1, 0, 3, True)]
    run.finish()


def test_no_output_is_wanted():
    run = Run()
    run.submit([1, 2, 3], max_tokens=0)
    run.submit([1, 2, 3], max_tokens=0, prompt_logprobs=2)   # its logprobs are checked by the driver
    run.finish()
    assert [(t.finish, t.out) for t in run.tracks.values()] == [("length", [])] * 2


def test_the_context_ends_the_output():
    run = Run()
    run.submit([1] * 40, max_tokens=40, **LONG)
    run.finish()
    assert (run.tracks["r0"].finish, len(run.tracks["r0"].out)) == ("length", 8)


# ---- the cache

@pytest.mark.parametrize(("length", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_an_exact_hit_computes_at_least_one_token(length, cached):
    run = Run(page=4)
    for _ in range(4):
        run.submit([*range(length)], max_tokens=6, **LONG)
        run.drain()
    assert [t.cached for t in run.tracks.values()] == [0, cached, cached, cached]
    assert len({tuple(t.out) for t in run.tracks.values()}) == 1 and run.tracks["r0"].out
    run.finish()


def test_output_is_cached_too():
    run = Run(page=4)
    first = run.submit([*range(5)], max_tokens=8, **LONG)
    run.drain()
    run.submit([*range(5), *run.tracks[first].out, 9], max_tokens=1)
    run.finish()
    assert run.tracks["r1"].cached == 12                     # 13 tokens known, the last one's K and V never computed


def test_prompts_of_one_step_share_pages():
    run = Run(page=4, chunk=40)
    run.submit([*range(16)], max_tokens=1)
    run.submit([*range(16)], max_tokens=1)
    run.step()
    assert ranges(run) == [(1, 0, 16, True), (2, 12, 16, True)] and run.tracks["r1"].cached is None
    run.finish()
    assert run.tracks["r1"].cached == 12


def test_a_prompt_catches_up_with_pages_that_another_has_cached():
    run = Run(page=4, chunk=6, score_rows=5)
    prompt = [*range(24)]
    run.submit(prompt, max_tokens=0, prompt_logprobs=0)      # 5 tokens a step, cached when it ends
    run.submit(prompt, max_tokens=2)                         # the one token that is left of the budget
    starts = []
    while run.scheduler.running or run.scheduler.waiting:
        run.step()
        starts += [(r[1], r[2]) for r in ranges(run) if r[0] == 2] if run.flight else []
    assert starts[:7] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 6), (6, 12), (20, 24)]
    run.finish()


def test_other_domains_share_nothing():
    run = Run(page=4)
    for domain in (b"", cache_domain(salt="a"), cache_domain(salt="a"), b""):
        run.submit([*range(9)], domain, max_tokens=1)
        run.drain()
    assert [t.cached for t in run.tracks.values()] == [0, 0, 8, 8]
    run.finish()


def test_flush_leaves_running_requests_alone():
    run = Run(page=4)
    run.submit([*range(9)], max_tokens=12, **LONG)
    for _ in range(4):
        run.step()
    assert run.cache.tree.protected == 2
    run.flush()
    assert run.cache.tree.protected == 2 and run.cache.cached_tokens(np.arange(9, dtype=np.int32), b"") == 8
    run.finish()


# ---- memory pressure

def short_of_memory(**second) -> Run:
    """Two requests that outgrow 12 pages of 4 tokens together, stepped until one is sent back."""
    run = Run(page=4, pages=13)
    run.submit([*range(16)], max_tokens=20, **LONG)
    run.submit([*range(20, 36)], **({"max_tokens": 20, "ignore_eos": True} | second))
    for _ in range(40):
        run.step()
        if run.scheduler.stats.preemptions:
            return run
    raise AssertionError("memory was never short")


def test_the_latest_request_is_retracted_and_resumes_undisturbed():
    run = short_of_memory()
    assert [r.id for r in run.scheduler._running.values()] == ["r0"] and run.scheduler.waiting == 1
    run.finish()
    stats = run.scheduler.stats.snapshot()
    assert [len(t.out) for t in run.tracks.values()] == [20, 20]  # right tokens: the driver compares each
    assert (stats["preemptions"], stats["requests"], stats["prompt_tokens"]) == (1, 2, 32)
    assert stats["cached_tokens"] == 0 and stats["hit_rate_window"] == stats["hit_rate_total"] == 0.0
    assert stats["reprefill_tokens"] > 16 and 0 < stats["reprefill_cached_tokens"] < stats["reprefill_tokens"]
    assert run.tracks["r1"].cached == 0                      # what it found after retraction is no cache hit


def test_the_lower_priority_is_retracted():
    run = Run(page=4, pages=13)
    run.submit([*range(16)], max_tokens=20, **LONG)
    run.submit([*range(20, 36)], priority=1, max_tokens=20, **LONG)
    while not run.scheduler.stats.preemptions:
        run.step()
    assert [r.id for r in run.scheduler._running.values()] == ["r1"]
    run.finish()


def test_a_retracted_request_goes_before_newcomers():
    run = short_of_memory()
    late = run.submit([30] * 20, max_tokens=2)
    while run.scheduler.waiting == 2:
        run.step()
    assert "r1" in {r.id for r in run.scheduler._running.values()} and not run.tracks[late].finish
    run.finish()


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_prompt_logprobs_survive_retraction(max_tokens):
    """Whatever the step in which memory runs out: during the prompt, on its last chunk, or later."""
    computed = set()
    for score_rows, pages in itertools.product((2, 4), range(30, 40)):
        run = Run(page=1, pages=pages, max_model_len=26, score_rows=score_rows)
        for i in range(3):
            run.submit([i] * 4, max_tokens=12, **LONG)
        run.step()
        rid = run.submit([*range(20, 32)], max_tokens=max_tokens, prompt_logprobs=1, **LONG)
        while not run.tracks[rid].finish:
            slot = next((s for s, r in run.scheduler._running.items() if r.id == rid), 0)
            before, preemptions = int(run.scheduler.table.computed[slot]), run.scheduler.stats.preemptions
            run.step()
            if slot and run.scheduler.stats.preemptions > preemptions:  # it is the latest, so it was the one
                computed.add(before)
        run.finish()                                         # the driver compares the logprobs
    assert min(computed) < 12 <= max(computed), computed


# ---- endings

@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "last token in flight", "retracted"])
@pytest.mark.parametrize("overlap", [True, False])
def test_abort_in_every_state_returns_every_page(state, overlap):
    if state == "retracted":
        run, victim = short_of_memory(), "r1"
        assert [r.id for r in run.scheduler.queue] == [victim]
    else:
        run = Run(chunk=8, max_running=1)
        run.submit([*range(20)], max_tokens=4, **LONG)
        victim = run.submit([7] * 9, max_tokens=2) if state == "waiting" else "r0"
        for _ in range({"waiting": 1, "prefilling": 1, "decoding": 4, "last token in flight": 6}[state]):
            run.step(overlap)
    assert not run.tracks[victim].finish or not overlap
    finished = run.tracks[victim].finish
    run.abort(victim)
    outputs = run.step(overlap)
    assert [o.finish for o in outputs if o.id == victim] == ([] if finished else ["abort"])
    run.finish()


def test_a_stop_drops_the_token_that_is_in_flight():
    run = Run()
    for prompt in range(40):
        run.submit([prompt], max_tokens=40)
        run.drain()
    stopped = [t for t in run.tracks.values() if t.finish == "stop"]
    assert stopped and all(t.out[-1] == EOS and EOS not in t.out[:-1] for t in stopped)
    run.finish()


def test_waiting_too_long():
    run = Run(max_running=1, waiting_timeout=6.0)
    run.submit([1, 2], max_tokens=40, **LONG)
    run.submit([3, 4], max_tokens=4)
    run.step()
    run.wait(7.4)
    (output,) = [o for o in run.step() if o.finish]
    assert (output.id, output.finish, output.status) == ("r1", "error", 503)
    assert output.error == "waited 7 s, the limit is 6 s (--waiting-timeout)"
    run.finish()


def test_running_too_long():
    run = Run(running_timeout=20.0)
    run.submit([1, 2], max_tokens=40, **LONG)
    run.step()
    run.wait(21.0)
    outputs = [o for o in run.step() if o.finish]
    assert [(o.finish, o.error, o.status) for o in outputs] == [
        ("error", "ran 21 s, the limit is 20 s (--running-timeout)", 504)]
    run.finish()


@pytest.mark.parametrize("kind", ["build", "launch", "collect"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_failed_step_ends_the_running_requests_only(kind, overlap):
    run = Run(max_running=1)
    run.submit([*range(9)], max_tokens=30, **LONG)
    run.submit([*range(9)], max_tokens=3, **LONG)
    for _ in range(4):
        run.step(overlap)
    run.fail_next(kind)
    outputs = run.step(overlap) + run.step(overlap)
    assert [(o.id, o.finish) for o in outputs if o.finish] == [("r0", "error")]
    assert [o.error for o in outputs if o.finish][0] in ("no bucket", "out of memory", "the device gave up")
    run.finish()
    assert (run.tracks["r1"].finish, run.tracks["r1"].cached) == ("length", 0)  # nothing of the failed step is used


def test_production_goes_on_with_a_page_less():
    """Somebody releases a running request's page: it stays in use, and is never handed out again."""
    run = Run(page=4, pages=20, strict=False)
    for first in (0, 10, 20):
        run.submit([*range(first, first + 9)], max_tokens=20, **LONG)
    for _ in range(3):
        run.step()
    pool, page = run.cache.pool, int(run.scheduler.table.pages[2, 2])
    pool.release(np.array([page]), 3)
    assert (pool.quarantined, pool.violations) == (1, 1)
    run.drain()                                              # the driver verifies the ledger in each step
    run.flush()
    assert {t.finish for t in run.tracks.values()} == {"length"} and pool.quarantined == 1
    assert sorted(pool._free[:pool.free].tolist()) == sorted(set(range(1, 20)) - {page})


# ---- counters

def test_stats_are_in_tokens_and_for_first_attempts():
    run = Run(page=4)
    run.submit([*range(9)], max_tokens=3, **LONG)
    run.wait(2.0)
    run.drain()
    run.submit([*range(9), 9, 9, 9], max_tokens=3, **LONG)
    run.finish()
    stats = run.scheduler.stats.snapshot()
    assert stats["queue_seconds"] == pytest.approx(2.01 + 0.01)
    del stats["queue_seconds"]
    assert stats == {"requests": 2, "prompt_tokens": 21, "cached_tokens": 8, "reprefill_tokens": 0,
                     "reprefill_cached_tokens": 0, "generated_tokens": 6, "forced_tokens": 0,
                     "preemptions": 0,
                     "finish_reasons": {"length": 2}, "hit_rate_window": 8 / 21, "hit_rate_total": 8 / 21}


def test_the_window_forgets_and_the_counters_do_not():
    class Admitted:
        attempts, known, arrival = 0, 10, 0.0

    stats = SchedulerStats()
    for cached in [10] * 50 + [0] * 950 + [5] * 50:
        stats.admitted(Admitted(), cached, 0.0)
    assert stats.hit_rate_window() == 250 / 10_000           # the first 50 are out of the window of 1,000
    assert stats.snapshot()["hit_rate_total"] == 750 / 10_500
    again = Admitted()
    again.attempts = 1
    stats.admitted(again, 10, 0.0)
    assert (stats.requests, stats.reprefill_tokens, stats.reprefill_cached_tokens) == (1050, 10, 10)
    assert stats.hit_rate_window() == 250 / 10_000


# ---- draws, histories and domains

def test_uniforms_are_a_function_of_seed_and_position():
    seeds, steps = np.array([0, 1, 2**64 - 1, 1], np.uint64), np.array([0, 0, 7, 1], np.int32)
    together = uniforms(seeds, steps)
    assert together.dtype == np.float32 and len(set(together.tolist())) == 4
    for i in range(4):
        assert uniforms(seeds[i:i + 1], steps[i:i + 1])[0] == together[i]
    np.testing.assert_array_equal(uniforms(seeds[::-1], steps[::-1]), together[::-1])


def splitmix64(state: int) -> int:
    """The published finalizer, with Python's integers."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


@pytest.mark.parametrize(("seed", "step"), [(0, 0), (1, 0), (1, 1), (2**64 - 1, 5), (12345, 10_000)])
def test_uniforms_follow_splitmix64(seed, step):
    golden = 0x9E3779B97F4A7C15
    bits = splitmix64((splitmix64((seed + golden) % 2**64) + (step + 1) * golden) % 2**64)
    assert uniforms(np.array([seed], np.uint64), np.array([step], np.int32))[0] == (bits >> 40) * 2.0**-24


@pytest.mark.parametrize("axis", ["steps of one seed", "first steps of many seeds"])
def test_uniforms_are_uniform(axis):
    count = np.arange(100_000)
    seeds, steps = (np.full(len(count), 7), count) if axis.startswith("steps") else (count, np.zeros(len(count)))
    u = uniforms(seeds.astype(np.uint64), steps.astype(np.int32))
    assert 0 <= u.min() and u.max() < 1
    histogram = np.histogram(u, 100, (0, 1))[0]
    assert ((histogram - 1000) ** 2 / 1000).sum() < 165      # chi square, 99 degrees of freedom: 1 in 25,000
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.015


def test_history_counts_output_and_lists_the_prompt():
    history = History(np.array([5, 9, 5], np.int32))
    for token in (5, 7, 7, *range(20, 60)):
        history.add(token)
    counts = dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True))
    assert counts == {5: 1, 9: 0, 7: 2, **dict.fromkeys(range(20, 60), 1)}


def test_cache_domains_are_pairwise_distinct():
    a, b = "aa" * 32, "ab" + "aa" * 31
    cases = [{}, {"adapter": ("X", 1)}, {"salt": "X"}, {"adapter": ("X", 2)}, {"adapter": ("Y", 1)}, {"salt": "Y"},
             {"adapter": ("X", 1), "salt": "X"}, {"images": ((a, 0, 8),)}, {"images": ((b, 0, 8),)},
             {"images": ((a, 4, 8),)}, {"images": ((a, 0, 9),)}, {"images": ((a, 0, 8), (a, 0, 8))}, {"salt": "1"},
             {"adapter": ("1", 1)}, {"salt": "X1"}, {"adapter": ("", 1)}, {"salt": "\ud800"},
             {"adapter": ("X", 11)}, {"adapter": ("X1", 1)}, {"salt": "adapter"}]
    domains = [cache_domain(**case) for case in cases]
    for (i, x), (j, y) in itertools.combinations(enumerate(domains), 2):
        assert x != y, f"{cases[i]} and {cases[j]} share a domain"
    assert [cache_domain(**case) for case in cases] == domains
    assert cache_domain() == cache_domain(salt="") == b""
