"""What the scheduler expects: output lengths, memory to come, time of a step; and what the queue may hold."""
from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from isthmus.core.cache.manager import CacheManager
from isthmus.core.errors import Overloaded
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.scheduler.admission import Limits
from isthmus.core.scheduler.outlook import LEAST_CHUNK, Growth, Pace
from isthmus.core.scheduler.scheduler import Scheduler

from .scheduling import Run

COST = 5  # seconds
LIMITS = Limits(max_running=4, max_queued=10_000, chunk=64, page_size=16, max_model_len=8192, vocab_size=1000)


# ---- growth

def learnt(*lengths: int) -> Growth:
    growth = Growth()
    for length in lengths:
        growth.ended(length)
    return growth


def remaining(growth: Growth, outputs: int, most: int = 10**6) -> float:
    return float(growth.remaining(np.array([outputs]), np.array([most]))[0])


def test_outputs_are_expected_to_end_as_others_did():
    growth = learnt(*[100] * 200)
    assert remaining(growth, 0) == pytest.approx(100, rel=0.02)
    assert remaining(growth, 60) == pytest.approx(40, rel=0.05)
    assert remaining(growth, 0, most=30) == 30, "no more than it may produce"


def test_who_has_outlived_the_short_ones_is_expected_to_live_long():
    growth = learnt(*[10, 1000] * 300)
    assert remaining(growth, 0) == pytest.approx(505, rel=0.05)
    assert remaining(growth, 50) == pytest.approx(950, rel=0.05)
    assert remaining(growth, 5000) == 5001, "longer than any so far: it may double"


def test_what_was_long_ago_is_forgotten():
    growth = learnt(*[1000] * 500, *[10] * 1500)
    assert remaining(growth, 0) < 12


def test_a_retraction_makes_cautious_for_a_while():
    growth = learnt(*[100] * 200)
    before = remaining(growth, 0)
    growth.retracted()
    assert remaining(growth, 0) == pytest.approx(1.25 * before)
    for _ in range(20):
        growth.retracted()
    assert remaining(growth, 0) == pytest.approx(2 * before)
    for _ in range(400):
        growth.ended(100)
    assert remaining(growth, 0) == pytest.approx(before, rel=0.02)


def test_the_peak_of_memory_by_hand():
    """Pages of 10: at the end of the 20-token one all three have grown by 2 pages (and half a page each of rounding);
    then its 4 go back, and so on."""
    peak = Growth().peak(np.array([20.0, 100.0, 50.0]), np.array([4, 1, 2]), 10)
    assert peak == max(3 * 2.5, 2 * 5.5 - 4, 1 * 10.5 - 4 - 2) == 7.5


def admitted(foresight: int, lengths: int) -> tuple[int, int]:
    """(requests run at most at once, retractions) of 40 requests of 24 tokens each in memory for four whole ones."""
    run = Run(page=1, pages=4 * 28 + 1, max_running=12, max_queued=64, foresight=foresight, waiting_timeout=1e6,
              running_timeout=1e6)
    for _ in range(lengths):
        run.scheduler.growth.ended(24)
    for i in range(40):
        run.submit([i % 40, 1, 2, i % 7], max_tokens=24, ignore_eos=True)
    most = 0
    while run.scheduler.running or run.scheduler.waiting:
        run.step()
        most = max(most, run.scheduler.running)
    preemptions = run.scheduler.stats.preemptions
    run.finish()
    return most, preemptions


def test_retraction_is_rare_once_lengths_are_known():
    blind, foreseen = admitted(0, 0), admitted(8, 8)
    assert blind[1] >= 20 and foreseen[1] <= 3, (blind, foreseen)
    assert foreseen[0] >= 4, "memory for four whole requests is used by more than that, at different ages"


# ---- pace

@pytest.mark.parametrize(("base", "each"), [(0.004, 20e-6), (0.010, 50e-6), (0.001, 100e-6)])
def test_the_chunk_finds_the_target(base, each):
    pace, target = Pace(0.020, 2048), 0.020
    taken = []
    for _ in range(60):
        chunk = pace.budget(decoding=4)
        taken.append(base + each * chunk)
        pace.observe(chunk, 4, taken[-1])
    assert pace.budget(4) == pytest.approx((target - base) / each, rel=0.1)
    assert max(taken[20:]) <= 1.1 * target
    assert pace.budget(0) == 2048, "nobody waits for a token"
    assert pace.per_token == pytest.approx(taken[-1] / pace.budget(4), rel=0.2)


def test_prompts_get_on_whatever_the_target():
    pace = Pace(0.001, 512)
    for _ in range(30):
        pace.observe(pace.budget(8), 8, 0.5)
    assert pace.budget(8) == LEAST_CHUNK


def test_without_a_target_the_chunk_stays():
    pace = Pace(0.0, 512)
    pace.observe(512, 8, 10.0)
    assert pace.budget(8) == 512 and pace.per_token == 10 / 512


def test_time_between_plans_is_the_step():
    """A device that takes 1 ms a prompt token, a target of 8 ms, no clock but what is handed in."""
    run = Run(page=4, pages=60, chunk=40, itl_target=0.008, max_running=6)
    run.submit([1, 2, 3], max_tokens=40, ignore_eos=True)
    for _ in range(3):
        run.step()
    sizes = []
    for i in range(5):
        run.submit([*range(i, i + 36)], max_tokens=1)
    while run.scheduler.running > 1 or run.scheduler.waiting:
        tokens = run.flight[0].prompt_tokens if run.flight else 0
        run.now += 0.001 * tokens - 0.01  # a turn of the driver takes 0.01 s
        run.step()
        sizes.append(run.flight[0].prompt_tokens if run.flight else 0)
    assert sizes[0] == 36 + 4 and max(sizes[6:]) <= 20, sizes
    run.finish()


# ---- the queue

def submit_of(id: str, tokens: int, max_tokens: int = 7000) -> Submit:
    return Submit(id, pack_ids(np.arange(tokens) % 1000), SamplingParams(max_tokens=max_tokens))


def test_the_queue_is_bounded_in_tokens():
    limits = Limits(4, 10_000, 64, 16, 8192, 1000, max_queued_tokens=2000)
    scheduler = Scheduler(limits, CacheManager(600, 16, strict=True))
    scheduler.submit(submit_of("long", 5000), 0.0)     # one is always taken
    with pytest.raises(Overloaded, match="have 5000 tokens, the limit is 2000.*--max-queued-tokens") as caught:
        scheduler.submit(submit_of("b", 1), 0.0)
    assert (caught.value.status, caught.value.retry_after) == (429, 1.0)
    scheduler.pace.observe(1000, 0, 2.0)               # 2 ms a token: half of the queue takes 5 s
    with pytest.raises(Overloaded) as caught:
        scheduler.submit(submit_of("b", 1), 0.0)
    assert caught.value.retry_after == 5.0
    scheduler.abort(["long"])
    for i in range(20):
        scheduler.submit(submit_of(f"r{i}", 100), 0.0)
    assert scheduler.queue.tokens == 2000
    with pytest.raises(Overloaded):
        scheduler.submit(submit_of("b", 1), 0.0)


def test_a_waiting_request_costs_its_prompt_and_a_kilobyte():
    """Nothing is sized by what it may produce, before it is admitted."""
    scheduler, count = Scheduler(LIMITS, CacheManager(600, 16)), 500
    submits = [submit_of(f"r{i}", 1000) for i in range(count)]
    tracemalloc.start()
    for submit in submits:
        scheduler.submit(submit, 0.0)
    taken = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    assert taken < 1024, f"{taken:.0f} bytes beyond the prompt, which is kept as it came"
    assert scheduler.queue.tokens == 1000 * count
