"""What is asked: one `Workload` for every part of the suite, over HTTP or in this process."""
from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, shown
from ..replay.formats import read_trace
from ..replay.trace import Trace
from .text import WORDS

Prompt = list[int] | str | list[dict[str, Any]]
MAX_REQUESTS = 1_000_000
MAX_TOKENS = 1_000_000  # of one prompt, and of one answer


@dataclass(frozen=True)
class Ask:
    """One request. prompt: token ids, a text, or messages; of a later turn the new messages alone, as what was asked
    and answered before comes in front of them."""

    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True)
class Session:
    """Requests of one client, each sent when the one before is answered, after `think` seconds. due: seconds from the
    start, where the workload itself says when it comes; None = an arrival process does."""

    asks: tuple[Ask, ...]
    due: float | None = None
    think: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Sessions, the same at each call of `sessions`.

    requests: in all.  facts: how it was made, for results.  vocab: ids below it are drawn, where prompts are ids.
    timed: sessions say when they are due.
    """

    name: str
    requests: int
    sessions: Callable[[], Iterator[Session]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    timed: bool = False


@dataclass(frozen=True)
class Shape:
    """The sizes of drawn prompts. spread: lengths are drawn evenly from this share below to as much above.

    shared: tokens in front that all requests of a group have; groups: how many such prefixes there are.
    as_text: words instead of token ids, about as many.
    """

    requests: int
    prompt_tokens: int
    max_tokens: int
    seed: int
    vocab: int
    spread: float = 0.0
    shared: int = 0
    groups: int = 1
    as_text: bool = False

    def drawn(self, draw: random.Random, size: int) -> int:
        return max(1, round(size * (1 + self.spread * draw.uniform(-1, 1)))) if self.spread else size

    def part(self, draw: random.Random, size: int) -> list[Any]:
        """So many random tokens, or words."""
        return draw.choices(WORDS, k=size) if self.as_text else draw.choices(range(self.vocab), k=size)

    def joined(self, parts: list[Any]) -> Prompt:
        return " ".join(parts) if self.as_text else parts

    @property
    def facts(self) -> dict[str, Any]:
        return {**vars(self), "vocab": None if self.as_text else self.vocab}


def drawn_prompts(shape: Shape) -> Workload:
    """Random prompts; with shared tokens, behind one of the prefixes, which are drawn evenly."""
    def sessions() -> Iterator[Session]:
        draw = random.Random(shape.seed)
        prefixes = [shape.part(draw, shape.shared) for _ in range(shape.groups)] if shape.shared else [[]]
        for _ in range(shape.requests):
            own = shape.part(draw, max(1, shape.drawn(draw, shape.prompt_tokens - shape.shared)))
            prompt = shape.joined(draw.choice(prefixes) + own)
            yield Session((Ask(prompt, shape.drawn(draw, shape.max_tokens)),))
    return Workload("shared-prefix" if shape.shared else "random", shape.requests, sessions, shape.facts)


def conversations(shape: Shape, turns: int, think: float) -> Workload:
    """Conversations of so many turns: each user's message has the prompt's size, and the answers stay in the context.
    shared: words of a system prompt that all have."""
    asks = -(-shape.requests // turns)

    def sessions() -> Iterator[Session]:
        draw = random.Random(shape.seed)
        system = " ".join(draw.choices(WORDS, k=shape.shared))
        first = [{"role": "system", "content": system}] if system else []
        left = shape.requests
        for _ in range(asks):
            said = [" ".join(draw.choices(WORDS, k=shape.drawn(draw, shape.prompt_tokens)))
                    for _ in range(min(turns, left))]
            left -= len(said)
            yield Session(tuple(
                Ask([*(first if i == 0 else []), {"role": "user", "content": text}],
                    shape.drawn(draw, shape.max_tokens)) for i, text in enumerate(said)), think=think)
    return Workload("multi-turn", shape.requests, sessions, {**shape.facts, "turns": turns, "think": think})


def traced(path: Path, requests: int | None, vocab: int, seed: int, speed: float = 1.0, block: int | None = None,
           most: int | None = None, as_text: bool = False) -> Workload:
    """A trace's requests at its times: prompts of its lengths that share what its blocks share, answers of its lengths.
    most: longer prompts are cut, and answers too, as the server could not take them. as_text: a word for each token.

    Raises `TraceError` for what is no trace.
    """
    trace = read_trace(path, block, seed)
    if requests is not None:
        trace = trace.head(requests)
    if len(trace) > MAX_REQUESTS:
        raise ConfigError(f"{path}: {len(trace)} requests, at most {MAX_REQUESTS} are sent: --requests takes the first")

    def sessions() -> Iterator[Session]:
        for i in range(len(trace)):
            tokens, out = int(trace.inputs[i]), max(1, int(trace.outputs[i]))
            if most is not None:
                out = min(out, max(1, most // 2))
                tokens = min(tokens, most - out)
            ids = _trace_prompt(trace, i, max(1, tokens), len(WORDS) if as_text else vocab, seed)
            prompt = " ".join(WORDS[token] for token in ids) if as_text else ids
            yield Session((Ask(prompt, out),), float(trace.arrival[i]) / speed)
    return Workload("trace", len(trace), sessions, {
        "trace": path.name, "form": trace.form, "block_tokens": trace.block, "speed": speed, "seed": seed,
        "longest": most, "input_tokens": int(trace.inputs.sum()), "output_tokens": int(trace.outputs.sum())},
        timed=True)


def _trace_prompt(trace: Trace, i: int, tokens: int, vocab: int, seed: int) -> list[int]:
    """Ids drawn by block number, so that equal blocks are equal; what is no whole block is the request's own."""
    whole = [np.random.default_rng((seed, 0, int(number))).integers(vocab, size=trace.block)
             for number in trace.request(i)[:tokens // trace.block]]
    rest = np.random.default_rng((seed, 1, i)).integers(vocab, size=tokens - trace.block * len(whole))
    return np.concatenate([*whole, rest]).tolist()


def from_file(path: Path, rows: Iterator[tuple[int, Any]], requests: int | None, max_tokens: int) -> Workload:
    """Prompts of a JSONL file, a line each: `prompt` (a text or token ids) or `messages`, and `max_tokens` where it is
    not `max_tokens`; what batch files and dumps of requests have in their `body` counts too. Read whole before it
    starts. Raises `ConfigError` that names the line of what is none of these."""
    kept: list[Session] = []
    for number, row in rows:
        if len(kept) == (requests or MAX_REQUESTS):
            break
        kept.append(Session((_ask(path, number, row, max_tokens),)))
    if not kept:
        raise ConfigError(f"{path}: there is no prompt in it")
    return Workload("prompts", len(kept), lambda: iter(kept), {"prompts": path.name, "max_tokens": max_tokens})


def _ask(path: Path, number: int, row: Any, max_tokens: int) -> Ask:
    body = row.get("body", row) if isinstance(row, dict) else {}
    if isinstance(row, Exception):
        raise ConfigError(f"{path}: {row}")
    prompt = body.get("prompt", body.get("messages")) if isinstance(body, dict) else None
    kinds = {type(part) for part in prompt} if isinstance(prompt, list) else {None}
    if not prompt or not (isinstance(prompt, str) or kinds == {int} or kinds == {dict}):
        raise ConfigError(f"{path}, line {number}: neither a prompt (a text or token ids) nor messages are in it")
    limit = body.get("max_tokens", body.get("max_completion_tokens", max_tokens))
    if type(limit) is not int or not 1 <= limit <= MAX_TOKENS:
        raise ConfigError(f"{path}, line {number}: its max_tokens is {shown(limit)}, no number from 1 to {MAX_TOKENS}")
    return Ask(prompt, limit)
