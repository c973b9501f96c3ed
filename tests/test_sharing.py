"""Requests behind one prefix compute it once, whenever they come; how many tokens the device computes is counted."""
from __future__ import annotations

import numpy as np
import pytest
from isthmus.core.cache.manager import CacheManager
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.plan import Batch, StepResult
from isthmus.core.scheduler.admission import Limits
from isthmus.core.scheduler.batch import build_batch
from isthmus.core.scheduler.plans import Plan
from isthmus.core.scheduler.policy import POLICIES
from isthmus.core.scheduler.scheduler import Scheduler
from isthmus.core.specs import LayerState, StateSpec
from isthmus.platforms.null.platform import Platform, next_token

COST = 6  # seconds
PREFIX, SUFFIX, REQUESTS, PAGE, VOCAB = 1500, 20, 8, 16, 1000


class Server:
    """Scheduler and null platform, with a step in flight. `computed` counts the prompt tokens given to the device."""

    def __init__(self, chunk: int, policy: str = "lpm", pages: int = 1000):
        limits = Limits(REQUESTS, 100, chunk, PAGE, 2048, VOCAB)
        self.scheduler = Scheduler(limits, CacheManager(pages, PAGE, strict=True), policy)
        device = Platform({"vocab": str(VOCAB)})
        self.state = device.alloc(StateSpec((LayerState(1, 1),), "f32", PAGE, REQUESTS + 1), pages)
        self.run = device.compile(None, None, None)
        self.computed, self.now, self.flight = 0, 0.0, None
        self.prompts: dict[str, np.ndarray] = {}
        self.out: dict[str, list[int]] = {}

    def submit(self, id: str, prompt: np.ndarray, priority: int = 0, **params) -> None:
        self.prompts[id], self.out[id] = prompt, []
        params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, "ignore_eos": True} | params)
        self.scheduler.submit(Submit(id, pack_ids(prompt), params, tenant=id, priority=priority), self.now)

    def step(self) -> None:
        self.now += 0.01
        plan = self.scheduler.plan(self.now)
        previous, self.flight = self.flight, None
        if plan is not None:
            self.computed += plan.prompt_tokens
            self.flight = (plan, self.launch(plan))
        if previous is not None:
            self.settle(*previous)
        self.scheduler.verify()

    def launch(self, plan: Plan):
        batch, _ = build_batch(plan, self.scheduler.table, PAGE, None)
        self.scheduler.advance(plan)
        out, self.state = self.run(self.state, batch)
        return out

    def settle(self, plan: Plan, out) -> None:
        for output in self.scheduler.settle(plan, out.collect()):
            self.out[output.id] += np.frombuffer(output.tokens, np.int32).tolist()

    def finish(self, but: str = "") -> None:
        """To the end; every output is what its own prompt alone would give."""
        for _ in range(200):
            if not (self.flight or self.scheduler.running or self.scheduler.waiting or self.scheduler.has_ended):
                break
            self.step()
        for id, prompt in self.prompts.items():
            context = prompt.tolist()
            for token in self.out[id]:
                assert token == next_token(np.array(context, np.int32), VOCAB), f"{id} reads pages that are not its own"
                context.append(token)
            assert id == but or len(self.out[id]) == 4


def crowd(seed: int = 0) -> list[np.ndarray]:
    """Prompts of one prefix and their own endings."""
    random = np.random.default_rng(seed)
    prefix = random.integers(0, VOCAB, PREFIX)
    return [np.concatenate([prefix, random.integers(0, VOCAB, SUFFIX)]).astype(np.int32) for _ in range(REQUESTS)]


# The prefix once, and of each request its ending and at most the page in which the prefix stops.
ONCE = PREFIX + REQUESTS * (SUFFIX + PREFIX % PAGE)


@pytest.mark.parametrize("policy", POLICIES.names())
@pytest.mark.parametrize("chunk", [100, 512, 4096])
def test_eight_requests_behind_one_prefix_compute_it_once(chunk, policy):
    server = Server(chunk, policy)
    for i, prompt in enumerate(crowd()):
        server.submit(f"r{i}", prompt)
    server.finish()
    assert PREFIX + REQUESTS * SUFFIX <= server.computed <= ONCE


@pytest.mark.parametrize("chunk", [100, 512, 4096])
@pytest.mark.parametrize("apart", [1, 2, 5])
def test_also_when_they_come_one_after_the_other(chunk, apart):
    server = Server(chunk)
    for i, prompt in enumerate(crowd()):
        server.submit(f"r{i}", prompt)
        for _ in range(apart):
            server.step()
    server.finish()
    assert server.computed <= ONCE


@pytest.mark.parametrize("after", range(1, 8))
def test_also_when_the_first_is_aborted_in_the_middle(after):
    """What it has computed stays; the next one goes on there."""
    server = Server(200)
    for i, prompt in enumerate(crowd()):
        server.submit(f"r{i}", prompt)
    for _ in range(after):
        server.step()
    server.scheduler.abort(["r0"])
    server.finish(but="r0")
    assert server.computed <= ONCE


@pytest.mark.parametrize("policy", POLICIES.names())
@pytest.mark.parametrize("chunk", [100, 512, 4096])
def test_they_take_memory_for_it_once(chunk, policy):
    """All eight run at once where there is room for the prefix and eight endings, and none is sent back."""
    ending = -(-(PREFIX + SUFFIX + 4) // PAGE) - PREFIX // PAGE
    server = Server(chunk, policy, PREFIX // PAGE + REQUESTS * (ending + 1) + 1)  # one more each: admission's margin
    for i, prompt in enumerate(crowd()):
        server.submit(f"r{i}", prompt, max_tokens=4)
    most = 0
    while not all(server.out.values()):
        server.step()
        most = max(most, server.scheduler.running)
    server.finish()
    assert server.scheduler.stats.preemptions == 0 and most == REQUESTS


def test_two_crowds_at_once_compute_two_prefixes():
    server = Server(512)
    both = zip(crowd(1)[:4], crowd(2)[:4], strict=True)
    for i, prompt in enumerate(p for pair in both for p in pair):
        server.submit(f"r{i}", prompt)
    server.finish()
    assert 2 * PREFIX <= server.computed <= ONCE + PREFIX


def test_retracted_requests_lose_a_page_each_at_most():
    """All are sent back in the middle of their outputs and come again: only what never was in a full page is lost."""
    server = Server(4096)
    prompts = crowd()
    for i, prompt in enumerate(prompts):
        server.submit(f"r{i}", prompt, max_tokens=4)
    for _ in range(3):
        server.step()
    server.settle(*server.flight)
    server.flight, before = None, server.computed
    server.scheduler.retract_all()
    server.finish()
    assert server.scheduler.stats.preemptions == REQUESTS
    assert server.computed - before <= REQUESTS * PAGE


def test_the_columns_of_a_step_name_their_requests():
    """A request that ends while a step is in flight, and another that takes its slot, keep apart."""
    scheduler = Scheduler(Limits(1, 10, 64, PAGE, 256, VOCAB, (2,)), CacheManager(40, PAGE, strict=True))

    def submit(id: str) -> None:
        scheduler.submit(Submit(id, pack_ids([5, 6, 7]), SamplingParams(max_tokens=9, temperature=0.0)), 0.0)

    def launch() -> tuple[Plan, Batch]:
        plan = scheduler.plan(0.0)
        batch, _ = build_batch(plan, scheduler.table, PAGE, None)
        scheduler.advance(plan)
        return plan, batch

    def settle(plan: Plan, token: int) -> list[tuple[str, int, str | None]]:
        outputs = scheduler.settle(plan, StepResult(np.array([token], np.int32)))
        return [(o.id, *np.frombuffer(o.tokens, np.int32).tolist(), o.finish) for o in outputs]

    submit("a")
    settle(launch()[0], 11)
    inflight, _ = launch()
    scheduler.abort(["a"])
    submit("b")
    first, batch = launch()
    assert batch.seqs.tolist() == inflight.decode.tolist() == [1]
    assert settle(inflight, 12) == [("a", "abort")] and settle(first, 13) == [("b", 13, None)]
    assert scheduler.table.tokens[1, :4].tolist() == [5, 6, 7, 13]
    second, _ = launch()
    outputs = scheduler.settle(second, StepResult(np.array([14], np.int32)))
    assert not outputs.full and outputs.tokens.tolist() == [14] and [o.id for o in outputs] == ["b"]
    assert outputs.message().handles == pack_ids([scheduler.table.handle[1]])
