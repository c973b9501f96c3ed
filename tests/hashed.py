"""The model of the scheduler's tests: a hash of the whole context and of everything that decides a token.

The device reads it off the batch, the oracle off the request.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from isthmus.core.messages import SamplingParams, Submit, unpack_ids
from isthmus.core.plan import Batch
from isthmus.core.scheduler.request import penalised
from isthmus.core.scheduler.table import uniforms
from isthmus.platforms.null.platform import next_token

from .toy_grammar import Toy, ToyLibrary

VOCAB, EOS, MAX_LEN = 40, 3, 48
GRAMMARS = ToyLibrary(VOCAB, EOS)


class Draw(NamedTuple):
    """What decides a token besides the context. knobs: of the draw, () = greedy; penalties: factors, then counts."""

    knobs: tuple[float, ...]
    penalties: tuple[tuple[float, ...], ...]
    bias: dict[int, float]


def draw_token(context: Iterable[int], draw: Draw) -> int:
    """The model's next token: a hash, then the next id that is not banned."""
    numbers = [*draw.knobs, *(n for part in draw.penalties for n in part)]
    numbers += [n for item in sorted(draw.bias.items()) for n in item if n != float("-inf")]
    token = next_token(np.array([*context, *(round(n * 2**12) for n in numbers)], np.int64), VOCAB)
    while draw.bias.get(token, 0) == float("-inf"):
        token = (token + 1) % VOCAB
    return token


def requested(submit: Submit, outputs: list[int]) -> Draw:
    """The draw that a request asks for after `outputs`, from its parameters alone."""
    p, prompt = submit.params, unpack_ids(submit.prompt).tolist()
    knobs = ()
    if p.temperature > 0:
        u = uniforms(np.array([p.seed or 0], np.uint64), np.array([len(outputs)], np.int32))[0]
        knobs = (float(u) * 2**12, p.temperature, p.top_k, p.top_p, p.min_p)
    counts = [(t, outputs.count(t)) for t in sorted({*prompt, *outputs})] if penalised(p) else []
    factors = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty)] if penalised(p) else []
    bias = dict(p.logit_bias)
    if len(outputs) < p.min_tokens and p.grammar is None:  # whose mask sees to it
        bias |= dict.fromkeys(stop_ids(p), float("-inf"))
    return Draw(knobs, (*factors, *counts), bias)


def received(context: np.ndarray, batch: Batch, i: int) -> Draw:
    """The draw that logit row `i` of a batch carries."""
    s, knobs, penalties, bias = batch.sampling, (), (), {}
    if s.temperature is not None and s.temperature[i] > 0:
        off = ((s.top_k, 0), (s.top_p, 1), (s.min_p, 0))
        rest = [default if column is None else float(column[i]) for column, default in off]
        knobs = (float(s.uniform[i]) * 2**12, float(s.temperature[i]), *rest)
    if s.penalties is not None:
        p = s.penalties
        mine = p.rows == i
        counts = dict(zip(p.ids[mine].tolist(), p.counts[mine].tolist(), strict=True))
        assert len(counts) == mine.sum(), "a (row, id) pair of the penalties repeats"
        if p.pending[i]:
            counts[int(context[-1])] = counts.get(int(context[-1]), 0) + 1
        factors = (float(p.repetition[i]), float(p.presence[i]), float(p.frequency[i]))
        assert counts or factors == (1, 0, 0), f"row {i} has penalties {factors} and no counts"
        penalties = (factors, *sorted(counts.items())) if factors != (1, 0, 0) else ()
    if s.bias is not None:
        for token, value in zip(s.bias.ids[s.bias.rows == i], s.bias.values[s.bias.rows == i], strict=True):
            bias[int(token)] = bias.get(int(token), 0) + float(value)
    return Draw(knobs, penalties, bias)


def stop_ids(params: SamplingParams) -> set[int]:
    return {*params.stop_token_ids} | (set() if params.ignore_eos and params.grammar is None else {EOS})


def grammar_after(params: SamplingParams, outputs: list[int]) -> Toy | None:
    """The request's grammar after these outputs, of which it must allow each."""
    if params.grammar is None:
        return None
    toy = GRAMMARS.backend.compile(params.grammar.kind, params.grammar.source)
    for token in outputs:
        assert token in stop_ids(params) or toy.accept(token), f"token {token} after {toy.tokens[:-1]} is not allowed"
    return toy


def allowed_after(params: SamplingParams, outputs: list[int]) -> np.ndarray | None:
    """Which tokens a request may sample next, bool [VOCAB]; None = all."""
    toy = grammar_after(params, outputs)
    if toy is None:
        return None
    allowed = toy.allowed()
    if len(outputs) < params.min_tokens or params.ignore_eos:
        closed = allowed.copy()
        closed[list(stop_ids(params))] = False
        allowed = closed if closed.any() else allowed
    return allowed


def logprob_of(tokens: np.ndarray) -> np.ndarray:
    """The model's log-probability of a token, so that a misplaced row shows."""
    return (-np.asarray(tokens) / 8).astype(np.float32)
