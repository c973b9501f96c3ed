"""From logits to tokens on the host, all rows at once, in the order that `isthmus.core.plan.Sampling` states."""
from __future__ import annotations

import numpy as np
from isthmus.core.platform import Batch, Sampling, StepResult

from .layout import State


def sample(logits: np.ndarray, state: State, batch: Batch, entered: np.ndarray) -> StepResult:
    """[L, V] -> the step's result; sampled tokens are kept in the state. entered [T]: the tokens that went in."""
    raw, inputs = logits.astype(np.float64), entered[batch.logit_rows]
    drawn = choose(adjust(raw, batch.sampling, inputs), batch.sampling)
    sampled = batch.targets == -1
    tokens = np.where(sampled, drawn, np.maximum(batch.targets, 0)).astype(np.int32)
    state.last[batch.seqs[batch.rows[batch.logit_rows[sampled]]]] = tokens[sampled]
    if batch.sampling.top_logprobs is None:
        return StepResult(tokens)
    shifted = raw - raw.max(-1, keepdims=True)
    logprobs = (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))).astype(np.float32)
    top = np.argsort(-raw, axis=-1, kind="stable")[:, :len(batch.sampling.top_logprobs)].astype(np.int32)
    return StepResult(tokens, np.take_along_axis(logprobs, tokens[:, None], 1)[:, 0], top,
                      np.take_along_axis(logprobs, top, 1))


def adjust(logits: np.ndarray, sampling: Sampling, inputs: np.ndarray) -> np.ndarray:
    """[L, V] after mask, bias and penalties; a new array. inputs [L]: the token that each row follows."""
    logits = logits.copy()
    if sampling.mask is not None:
        sampling.mask.ready()
        bits = np.unpackbits(sampling.mask.bits.astype("<u4").view(np.uint8), axis=1, bitorder="little")
        rows, allowed = sampling.mask.rows, bits[:, :logits.shape[1]] == 1
        logits[rows] = np.where(allowed, logits[rows], -np.inf)
    if sampling.bias is not None:
        np.add.at(logits, (sampling.bias.rows, sampling.bias.ids), sampling.bias.values)
    if (penalties := sampling.penalties) is not None:
        counts = np.full(logits.shape, -1.0)  # -1: not one of the row's tokens
        counts[penalties.rows, penalties.ids] = penalties.counts
        pending = np.flatnonzero(penalties.pending)
        counts[pending, inputs[pending]] = np.maximum(counts[pending, inputs[pending]], 0) + 1
        factor = np.where(counts >= 0, penalties.repetition[:, None].astype(np.float64), 1)
        logits = np.where(logits > 0, logits / factor, logits * factor)
        logits -= penalties.presence[:, None] * (counts > 0) + penalties.frequency[:, None] * np.maximum(counts, 0)
    return logits


def choose(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """[L] tokens of adjusted logits [L, V]: the best of greedy rows, the lowest id among equals; the others drawn."""
    tokens = logits.argmax(-1)
    if sampling.temperature is None:
        return tokens
    rows = np.flatnonzero((sampling.temperature > 0) & np.isfinite(logits.max(-1)))

    def column(values: np.ndarray | None, off: float) -> np.ndarray:
        return np.full((len(rows), 1), off) if values is None else values[rows, None].astype(np.float64)
    some = logits[rows]
    weights = np.exp((some - some.max(-1, keepdims=True)) / column(sampling.temperature, 1))
    order = np.argsort(-some, axis=-1, kind="stable")
    ordered = np.take_along_axis(weights, order, 1)
    limit = column(sampling.top_k, 0)
    ordered[(limit > 0) & (np.arange(some.shape[1]) >= limit)] = 0
    before = np.cumsum(ordered, 1) - ordered
    top_p = column(sampling.top_p, 1)
    ordered[(top_p < 1) & (before >= top_p * ordered.sum(1, keepdims=True))] = 0
    ordered[:, 0] = 1  # the best stays whatever rounding says
    ordered[ordered < column(sampling.min_p, 0)] = 0
    np.put_along_axis(weights, order, ordered, 1)
    cumulative = np.cumsum(weights, 1)
    tokens[rows] = (cumulative <= column(sampling.uniform, 0) * cumulative[:, -1:]).sum(1)
    return tokens
