"""Deterministic workloads in token ids, so that every engine computes the same tokens.

W1 single stream: 128 tokens in, 128 out.  W2: 32 concurrent distinct prompts of 256, 64 out.
W3: 32 requests behind one prefix of 1,500 tokens plus 64 of their own, 32 out, 8 at a time.
W4: 8 conversations of 4 turns (64 shared system tokens, 96 new tokens a turn, 48 out), 8 at a time.
"""
from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

FIRST_ID, LAST_ID = 20, 49_000  # ordinary tokens of SmolLM2's vocabulary


@dataclass(frozen=True)
class Timing:
    """One request: seconds from start to first and to last token, tokens out, and their ids."""

    first: float
    last: float
    tokens: list[int]


Generate = Callable[[list[int], int], Timing]


def prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(FIRST_ID, LAST_ID, length).tolist()


def single_stream(generate: Generate, seed: int) -> dict[str, float]:
    """W1: decode tokens/s and milliseconds to the first token."""
    timing = generate(prompt(np.random.default_rng(seed), 128), 128)
    return {"decode_tps": (len(timing.tokens) - 1) / (timing.last - timing.first), "ttft_ms": 1e3 * timing.first}


def concurrent(generate: Generate, seed: int, count: int = 32) -> dict[str, float]:
    """W2: output tokens/s over the whole run, and the median time to the first token."""
    rng = np.random.default_rng(seed)
    return _together(generate, [prompt(rng, 256) for _ in range(count)], 64, 32)


def shared_prefix(generate: Generate, seed: int, count: int = 32) -> dict[str, float]:
    """W3: as W2, behind one prefix."""
    rng = np.random.default_rng(seed)
    system = prompt(rng, 1500)
    return _together(generate, [system + prompt(rng, 64) for _ in range(count)], 32, 8)


def multi_turn(generate: Generate, seed: int) -> dict[str, float]:
    """W4: each conversation sends its whole history every turn."""
    rng = np.random.default_rng(seed)
    system = prompt(rng, 64)
    turns = [[prompt(rng, 96) for _ in range(4)] for _ in range(8)]
    firsts: list[float] = []
    lock = threading.Lock()

    def converse(conversation: list[list[int]]) -> int:
        history, out = list(system), 0
        for turn in conversation:
            history += turn
            timing = generate(history, 48)
            history += timing.tokens
            out += len(timing.tokens)
            with lock:
                firsts.append(timing.first)
        return out

    began = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        out = sum(pool.map(converse, turns))
    wall = time.perf_counter() - began
    return {"wall_s": wall, "out_tps": out / wall, "ttft_p50_ms": 1e3 * float(np.median(firsts))}


def _together(generate: Generate, prompts: list[list[int]], out: int, at_once: int) -> dict[str, float]:
    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        timings = list(pool.map(lambda p: generate(p, out), prompts))
    wall = time.perf_counter() - began
    return {"wall_s": wall, "out_tps": sum(len(t.tokens) for t in timings) / wall,
            "ttft_p50_ms": 1e3 * float(np.median([t.first for t in timings]))}


WORKLOADS = {"W1": single_stream, "W2": concurrent, "W3": shared_prefix, "W4": multi_turn}
