"""Draws with speculation are as often what they are without: chi-square over two samples, with seeds of their own.

    pytest -m slow tests/test_speculation_draws.py --draws 20000

Every sampling parameter alone and with each other, by a draft model that is near the model, with branches. Few draws
unless more are asked for: seeds are fixed, so that the same draws are made each time.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from isthmus.core.engine import EngineCore
from isthmus.core.messages import SamplingParams, Submit, pack_ids, unpack_ids

from .drafting import engine
from .test_speculation_trees import near  # noqa: F401  (a fixture)

COST = 30  # seconds
VOCAB, END, TOKENS, BATCH = 131, 131, 3, 128
LEAST = 8      # draws in both samples together that a token needs for a class of its own
FAR = 4.5      # standard deviations; one in 300,000 is farther by chance
PROMPT = [3, 17, 92, 5, 40]
ASKS = {"temperature": {"temperature": 0.6}, "top_p": {"top_p": 0.8}, "top_k": {"top_k": 12}, "min_p": {"min_p": 0.05},
        "presence": {"presence_penalty": 1.2}, "frequency": {"frequency_penalty": 0.9},
        "repetition": {"repetition_penalty": 1.4}, "bias": {"logit_bias": {7: 2.0, 40: -3.0, 1: 3.0}},
        "min_tokens": {"min_tokens": 2, "logit_bias": {1: 6.0}}}
SETTINGS = [(), *((name,) for name in ASKS), *itertools.combinations(ASKS, 2)]


@pytest.fixture(scope="module")
def both(near) -> Iterator[tuple[EngineCore, EngineCore]]:  # noqa: F811
    """An engine without drafts, and one that drafts a tree each step."""
    given = {"platform": "cpu", "memory": "16MiB", "max_running_requests": BATCH}
    cores = engine(**given), engine("draft", f"model={near}", "tokens=2", "branches=1", "adaptive=0", **given)
    yield cores
    for core in cores:
        core.close()


def draws(core: EngineCore, asked: dict, count: int, seed: int) -> np.ndarray:
    """Tokens of `count` outputs for one prompt, END behind their ends: [count, TOKENS]."""
    found = np.full((count, TOKENS), END)
    for start in range(0, count, BATCH):
        numbers = range(start, min(count, start + BATCH))
        for i in numbers:
            core.submit(Submit(str(i), pack_ids(PROMPT), SamplingParams(
                max_tokens=TOKENS, seed=seed + i, **{"temperature": 1.0} | asked)))
        given = dict.fromkeys(numbers, 0)
        while core.has_work:
            for output in core.step():
                i, tokens = int(output.id), unpack_ids(output.tokens)
                found[i, given[i]:given[i] + len(tokens)] = tokens
                given[i] += len(tokens)
    return found


def chi_square(a: np.ndarray, b: np.ndarray) -> float:
    """How far two samples of classes are apart, in standard deviations (Wilson and Hilferty 1931): about normal where
    both are of one distribution. Rare classes are one."""
    counts = np.stack([np.bincount(each, minlength=VOCAB + 1) for each in (a, b)]).astype(float)
    often = counts.sum(0) >= LEAST
    counts = np.concatenate([counts[:, often], counts[:, ~often].sum(1, keepdims=True)], 1)
    counts = counts[:, counts.sum(0) > 0]
    free = counts.shape[1] - 1
    if not free:
        return 0.0
    wanted = counts.sum(1, keepdims=True) * counts.sum(0) / counts.sum()
    value = float(((counts - wanted) ** 2 / wanted).sum())
    return ((value / free) ** (1 / 3) - (1 - 2 / (9 * free))) / (2 / (9 * free)) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("names", SETTINGS, ids=lambda names: "+".join(names) or "plain")
def test_draws_are_as_often(both, names, request):
    asked: dict = {}
    for name in names:
        bias = asked.get("logit_bias", {}) | ASKS[name].get("logit_bias", {})
        asked |= ASKS[name] | ({"logit_bias": bias} if bias else {})
    count = request.config.getoption("--draws")
    before = both[1].command("stats")["accepted_tokens"]
    without, drafted = draws(both[0], asked, count, 0), draws(both[1], asked, count, 10**6)
    assert both[1].command("stats")["accepted_tokens"] > before and not both[1].scheduler.speculation.broken
    for place in range(1, TOKENS):  # the first token comes from the prompt
        far = chi_square(without[:, place], drafted[:, place])
        assert far < FAR, f"token {place}: {far:.1f} standard deviations apart in {count} draws"


def test_chi_square_tells_samples_apart():
    rng = np.random.default_rng(0)
    shares = np.arange(1, 21) / 210
    a, b = rng.choice(20, (2, 4000), p=shares)
    other = rng.choice(20, 4000, p=np.roll(shares, 1))
    assert abs(chi_square(a, b)) < 3 < FAR < chi_square(a, other)
