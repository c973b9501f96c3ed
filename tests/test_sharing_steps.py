"""A step's budget is shared: a short prompt behind a long one does not wait for the whole of it."""
from __future__ import annotations

import numpy as np
import pytest
from isthmus.core.scheduler.policy import POLICIES

from .test_sharing import VOCAB, Server

COST = 4  # seconds
CHUNK, LONG = 64, 1500


def prompt(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, size).astype(np.int32)


def until_answered(server: Server, id: str, limit: int = 200) -> int:
    """Steps until the request has its first token."""
    for steps in range(limit):
        if server.out[id]:
            return steps
        server.step()
    raise AssertionError(f"{id} has no token after {limit} steps")


@pytest.mark.parametrize("policy", POLICIES.names())
@pytest.mark.parametrize("size", [1, 20, 32])
def test_a_short_prompt_behind_a_long_one_is_answered_in_its_own_steps(policy, size):
    server = Server(CHUNK, policy)
    server.submit("long", prompt(1, LONG))
    for _ in range(3):
        server.step()
    server.submit("short", prompt(2, size))
    assert until_answered(server, "short") <= 3  # one step to be computed, one more for its result to be taken in
    server.finish()


def test_the_long_one_takes_twice_as_long_at_worst():
    server = Server(CHUNK)
    server.submit("long", prompt(1, LONG))
    for i in range(200):  # one every step, of half a step's budget: as much as may overtake
        if server.out["long"]:
            break
        server.submit(f"s{i}", prompt(2 + i, CHUNK // 2))
        server.step()
    assert LONG / CHUNK < i <= 2 * LONG / CHUNK + 3
    server.finish()


def test_several_short_ones_overtake_in_turn():
    server = Server(CHUNK, "fcfs")
    server.submit("long", prompt(1, LONG))
    server.step()
    for id, size in [("a", 90), ("b", 90), ("c", 10)]:
        server.submit(id, prompt(ord(id), size))
    assert until_answered(server, "a") <= 90 // 32 + 2
    assert until_answered(server, "c") <= 90 // 32 + 2 and until_answered(server, "b") <= 90 // 32 + 2
    assert not server.out["long"]
    server.finish()


def test_prompts_of_like_length_are_computed_one_after_another():
    server = Server(CHUNK, "fcfs")
    for id, size in [("a", 300), ("b", 299)]:
        server.submit(id, prompt(ord(id), size))
    assert until_answered(server, "a") <= -(-300 // CHUNK) + 1
    server.finish()


def test_a_prompt_of_lower_priority_overtakes_nobody():
    server = Server(CHUNK, "priority")
    server.submit("long", prompt(1, 640), priority=1)
    server.step()
    server.submit("short", prompt(2, 10), priority=0)
    server.submit("urgent", prompt(3, 10), priority=1)
    assert until_answered(server, "urgent") <= 3
    for _ in range(3):
        server.step()
    assert not server.out["short"] and not server.out["long"]
    server.finish()
