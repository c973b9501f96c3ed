"""From logits to tokens in the order that `Sampling` states, one row at a time where rows differ."""
from __future__ import annotations

import numpy as np

from ...core.platform import Bias, Mask, Penalties, Sampling


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def best_ids(logits: np.ndarray, count: int) -> np.ndarray:
    """The `count` largest per row, best first, the lower id first among equals."""
    return np.argsort(-logits, axis=-1, kind="stable")[..., :count].astype(np.int32)


def apply_mask(logits: np.ndarray, mask: Mask) -> None:
    mask.ready()
    bits = np.unpackbits(mask.bits.astype("<u4").view(np.uint8), axis=1, bitorder="little")
    allowed = bits[:, :logits.shape[1]].astype(bool)
    logits[mask.rows] = np.where(allowed, logits[mask.rows], -np.inf)


def apply_bias(logits: np.ndarray, bias: Bias) -> None:
    np.add.at(logits, (bias.rows, bias.ids), bias.values)


def apply_penalties(logits: np.ndarray, penalties: Penalties, inputs: np.ndarray) -> None:
    """`inputs` [L]: the token that each logit row's token follows; counted once more where it is pending."""
    seen = np.zeros(logits.shape, bool)
    counts = np.zeros(logits.shape)
    seen[penalties.rows, penalties.ids] = True
    counts[penalties.rows, penalties.ids] = penalties.counts
    pending = np.flatnonzero(penalties.pending)
    seen[pending, inputs[pending]] = True
    counts[pending, inputs[pending]] += 1
    repetition = penalties.repetition.astype(np.float64)[:, None]
    logits[:] = np.where(seen, np.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits -= penalties.presence[:, None] * (counts > 0) + penalties.frequency[:, None] * counts


def adjust(logits: np.ndarray, sampling: Sampling, inputs: np.ndarray) -> np.ndarray:
    """[L, V] after mask, bias and penalties; a new array."""
    logits = logits.copy()
    if sampling.mask is not None:
        apply_mask(logits, sampling.mask)
    if sampling.bias is not None:
        apply_bias(logits, sampling.bias)
    if sampling.penalties is not None:
        apply_penalties(logits, sampling.penalties, inputs)
    return logits


def draw(logits: np.ndarray, row: int, sampling: Sampling) -> int:
    """One token from adjusted logits [V] by the parameters of logit row `row`."""
    best = best_ids(logits, len(logits))
    if sampling.temperature is None or sampling.temperature[row] == 0 or np.isneginf(logits[best[0]]):
        return best[0]
    weights = np.exp((logits - logits[best[0]]) / np.float64(sampling.temperature[row]))
    if sampling.top_k is not None and sampling.top_k[row] > 0:
        best = best[:sampling.top_k[row]]
    if sampling.top_p is not None and sampling.top_p[row] < 1:
        cumulative = np.cumsum(weights[best])
        best = best[:1 + np.searchsorted(cumulative, sampling.top_p[row] * cumulative[-1])]
    if sampling.min_p is not None:
        best = best[weights[best] >= sampling.min_p[row] * weights[best[0]]]
    kept = np.sort(best)
    cdf = np.cumsum(weights[kept])
    place = np.searchsorted(cdf, sampling.uniform[row] * cdf[-1], side="right")
    return kept[min(place, len(kept) - 1)]


def choose(logits: np.ndarray, targets: np.ndarray, sampling: Sampling, inputs: np.ndarray) -> np.ndarray:
    """[L] tokens: the target where there is one, 0 for padding, otherwise drawn."""
    tokens = np.maximum(targets, 0).astype(np.int32)
    adjusted = adjust(logits, sampling, inputs)
    for row in np.flatnonzero(targets == -1):
        tokens[row] = draw(adjusted[row], row, sampling)
    return tokens
