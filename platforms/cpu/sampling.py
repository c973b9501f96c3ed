"""From logits to tokens in the order that `Sampling` states: all rows at once, and only the work a row asks for."""
from __future__ import annotations

import numpy as np
import torch

from ...core.platform import Bias, Mask, Penalties, Sampling, StepResult

CANDIDATES = 256  # best logits that top-k and top-p look at first; rows that need more look at all


def sample(logits: torch.Tensor, targets: np.ndarray, sampling: Sampling, inputs: np.ndarray) -> StepResult:
    """[L, V] logits (after a soft cap) -> the step's result. inputs [L]: the token that each logit row follows."""
    tokens = choose(adjust(logits, sampling, inputs), targets, sampling)
    tokens = np.where(targets == -1, tokens, np.maximum(targets, 0)).astype(np.int32)
    if sampling.top_logprobs is None:
        return StepResult(tokens)
    wide = logits.float()
    top = wide.amax(-1, keepdim=True)
    # Summed in float64, whose order of summing, which depends on the number of rows, is lost in rounding.
    total = top + (wide - top).exp_().sum(-1, keepdim=True, dtype=torch.float64).log_()
    chosen = wide.gather(1, torch.from_numpy(tokens.astype(np.int64))[:, None]) - total
    values, ids = best(wide, len(sampling.top_logprobs))
    return StepResult(tokens, chosen[:, 0].float().numpy(), ids.int().numpy(), (values - total).float().numpy())


def best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row and their ids, best first, the lower id first among equals that are included."""
    values, ids = logits.topk(min(count, logits.shape[1]), sorted=False)
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


# Mask, bias, penalties.

def adjust(logits: torch.Tensor, sampling: Sampling, inputs: np.ndarray) -> torch.Tensor:
    """[L, V] after mask, bias and penalties; the given logits stay as they are."""
    if sampling.mask is None and sampling.bias is None and sampling.penalties is None:
        return logits
    logits = logits.to(torch.float32, copy=True)
    if sampling.mask is not None:
        apply_mask(logits, sampling.mask)
    if sampling.bias is not None:
        apply_bias(logits, sampling.bias)
    if sampling.penalties is not None:
        apply_penalties(logits, sampling.penalties, inputs)
    return logits


def apply_mask(logits: torch.Tensor, mask: Mask) -> None:
    mask.ready()
    bits = np.unpackbits(mask.bits.astype("<u4", copy=False).view(np.uint8), axis=1, bitorder="little")
    banned = torch.from_numpy(bits[:, :logits.shape[1]] == 0)
    rows = torch.from_numpy(mask.rows)
    logits[rows] = logits[rows].masked_fill_(banned, -torch.inf)


def apply_bias(logits: torch.Tensor, bias: Bias) -> None:
    at = torch.from_numpy(bias.rows), torch.from_numpy(bias.ids)
    logits.index_put_(at, torch.from_numpy(bias.values.astype(np.float32, copy=False)), accumulate=True)


def apply_penalties(logits: torch.Tensor, penalties: Penalties, inputs: np.ndarray) -> None:
    """Only the entries named are touched. `inputs` counts once more where it is pending."""
    waiting = penalties.pending.astype(bool)
    again = waiting[penalties.rows] & (penalties.ids == inputs[penalties.rows])
    waiting[penalties.rows[again]] = False
    fresh = np.flatnonzero(waiting)
    rows = np.concatenate([penalties.rows, fresh])
    ids = np.concatenate([penalties.ids, inputs[fresh]])
    counts = np.concatenate([penalties.counts + again, np.ones(len(fresh), np.int32)])
    at = torch.from_numpy(rows.astype(np.int64)), torch.from_numpy(ids.astype(np.int64))
    values, repetition = logits[at], torch.from_numpy(penalties.repetition[rows])
    values = torch.where(values > 0, values / repetition, values * repetition)
    off = penalties.presence[rows] * (counts > 0) + penalties.frequency[rows] * counts
    logits[at] = values - torch.from_numpy(off.astype(np.float32, copy=False))


# Choice.

def choose(logits: torch.Tensor, targets: np.ndarray, sampling: Sampling) -> np.ndarray:
    """[L] tokens: greedy rows by argmax, which gives the lowest id among equals; the others drawn."""
    tokens = logits.float().numpy().argmax(-1)  # ten times as fast as torch's, and the first of equals too
    if sampling.temperature is None:
        return tokens
    drawn = np.flatnonzero((sampling.temperature > 0) & (targets == -1))
    cut = np.zeros(len(targets), bool)
    if sampling.top_k is not None:
        cut |= sampling.top_k > 0
    if sampling.top_p is not None:
        cut |= sampling.top_p < 1
    for rows, draw in ((drawn[~cut[drawn]], draw_from_all), (drawn[cut[drawn]], draw_from_best)):
        if len(rows):
            tokens[rows] = draw(*weigh(logits, rows, sampling), Rows.of(sampling, rows))
    return tokens


class Rows:
    """Parameters of some rows, [R, 1] tensors with their neutral values where a parameter is off."""

    def __init__(self, temperature: torch.Tensor, uniform: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
                 min_p: torch.Tensor) -> None:
        self.temperature, self.uniform, self.top_k, self.top_p, self.min_p = temperature, uniform, top_k, top_p, min_p

    @classmethod
    def of(cls, sampling: Sampling, rows: np.ndarray) -> Rows:
        def column(values: np.ndarray | None, off: float) -> torch.Tensor:
            part = np.full(len(rows), off) if values is None else values[rows].astype(np.float64)
            return torch.from_numpy(part)[:, None]
        return cls(column(sampling.temperature, 1), column(sampling.uniform, 0), column(sampling.top_k, 0),
                   column(sampling.top_p, 1), column(sampling.min_p, 0))

    def __getitem__(self, rows: torch.Tensor) -> Rows:
        return Rows(self.temperature[rows], self.uniform[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def weigh(logits: torch.Tensor, rows: np.ndarray, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of `rows`, and exp((logit - best) / temperature) in float32; 1 for the best id alone if all are banned."""
    some = logits[torch.from_numpy(rows)].float()
    top, place = some.max(-1, keepdim=True)
    weights = (some - top).div_(torch.from_numpy(sampling.temperature[rows])[:, None]).exp_()
    banned = top.isneginf()
    if banned.any():
        weights = weights.masked_fill_(banned, 0).scatter_add_(1, place, banned.float())
    return some, weights


def draw_from_all(logits: torch.Tensor, weights: torch.Tensor, rows: Rows) -> np.ndarray:
    """[R] tokens of rows without top-k and top-p, whose kept set needs no order."""
    kept = torch.where(weights >= rows.min_p, weights, 0)
    return invert(kept, rows.uniform).numpy()


def draw_from_best(logits: torch.Tensor, weights: torch.Tensor, rows: Rows) -> np.ndarray:
    """[R] tokens of rows with top-k or top-p, from the best logits; rows that those do not settle look at all."""
    tokens, settled = cut_and_draw(logits, weights, rows, min(CANDIDATES, logits.shape[1]))
    if not settled.all():
        rest = torch.from_numpy(np.flatnonzero(~settled))
        tokens[rest.numpy()] = sort_and_draw(logits[rest], weights[rest], rows[rest])
    return tokens


def kept_of(weights: torch.Tensor, total: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Which of the largest weights [R, n], in order, top-k, top-p and min-p keep. total: of all weights [R, 1]."""
    limited = rows.top_k > 0
    inside = ~limited | (torch.arange(weights.shape[1]) < rows.top_k)
    considered = torch.where(inside, weights, 0)
    total = torch.where(limited, considered.sum(1, keepdim=True), total)
    before = considered.cumsum(1) - considered
    kept = inside & ((before < rows.top_p * total) | (rows.top_p >= 1)) & (weights >= rows.min_p)
    kept[:, 0] = True
    return kept


def cut_and_draw(logits: torch.Tensor, weights: torch.Tensor, rows: Rows, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and whether the `count` best were enough: the kept ones end above the last of them, or that is all."""
    values, ids = best(logits, count)
    some = weights.gather(1, ids).double()
    kept = kept_of(some, weights.sum(1, keepdim=True, dtype=torch.float64), rows)
    last = values.gather(1, kept.sum(1, keepdim=True) - 1)
    settled = (last > values[:, -1:]) if count < logits.shape[1] else torch.ones_like(last, dtype=torch.bool)
    ids, order = ids.sort(dim=1)
    drawn = invert(torch.where(kept, some, 0).gather(1, order), rows.uniform)
    return ids.gather(1, drawn[:, None])[:, 0].numpy(), settled[:, 0].numpy()


def sort_and_draw(logits: torch.Tensor, weights: torch.Tensor, rows: Rows) -> np.ndarray:
    """Tokens from all logits. Values are sorted without their ids, which is many times as fast: what is kept are those
    above the last kept value, and the first of its equals."""
    values = torch.from_numpy(np.sort(logits.numpy(), axis=1)[:, ::-1].copy())
    ordered = (values - values[:, :1]).div_(rows.temperature.float()).exp_().nan_to_num_(0).double()
    count = kept_of(ordered, ordered.sum(1, keepdim=True), rows).sum(1, keepdim=True)
    last = values.gather(1, count - 1)
    above, equal = logits > last, logits == last
    kept = above | (equal & (equal.cumsum(1) <= count - above.sum(1, keepdim=True)))
    return invert(torch.where(kept, weights, 0), rows.uniform).numpy()


def invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """[R] first column whose cumulative weight exceeds uniform * total."""
    cumulative = weights.cumsum(1, dtype=torch.float64)
    place = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return place[:, 0].clamp_(max=weights.shape[1] - 1)
