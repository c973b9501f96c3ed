"""From logits to tokens on the device in the order that `Sampling` states: all rows at once, and nobody waits.

Everything is float32, since not every device has float64. Cumulative sums over the vocabulary go block by block, so
that their error grows with the block's length and the number of blocks, not with the vocabulary. A draw is wrong only
where `uniform` is that close to a step of the CDF.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from ...core.platform import Sampling, StepResult

BLOCK = 256  # entries of a block of a cumulative sum


class Sampled(NamedTuple):
    """A step's result on the device: tokens int32 [L] and, where asked for, logprobs [L], ids and values [L, K]."""

    tokens: torch.Tensor
    scores: tuple[torch.Tensor, ...]


def host_result(parts: list[np.ndarray]) -> StepResult:
    """What lies on the host by now."""
    if len(parts) == 1:
        return StepResult(parts[0])
    tokens, logprobs, ids, values = parts
    return StepResult(tokens, logprobs, ids.astype(np.int32, copy=False), values)


def arrays(sampling: Sampling, targets: np.ndarray) -> dict[str, np.ndarray]:
    """What `sample` needs on the device, as arrays to be fed; a field of the whole batch that is off has none."""
    found = {name: getattr(sampling, name) for name in ("temperature", "uniform", "top_k", "top_p", "min_p")}
    for name in ("penalties", "bias", "mask"):
        part = getattr(sampling, name)
        if part is not None:
            found |= {f"{name}.{field}": value for field, value in part._asdict().items() if not callable(value)}
    wide = {name: np.asarray(value) for name, value in found.items() if value is not None}
    return {name: value.astype(np.float32 if value.dtype.kind == "f" else value.dtype, copy=False)
            for name, value in wide.items()} | {"targets": targets}


def sample(logits: torch.Tensor, fed: Mapping[str, torch.Tensor], inputs: torch.Tensor, top: int | None,
           scored: bool) -> Sampled:
    """[L, V] float32 logits -> tokens. fed: `arrays` on the device. inputs [L]: the token that each row follows.

    top: number of best logprobs per row, None = no logprobs. scored: some rows have a target.
    """
    targets = fed["targets"]
    tokens = choose(adjust(logits, fed, inputs), fed)
    if scored:
        tokens = torch.where(targets == -1, tokens, targets.clamp_min(0))
    if top is None:
        return Sampled(tokens, ())
    total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, tokens.long()[:, None]) - total
    values, ids = best(logits, top)
    return Sampled(tokens, (chosen[:, 0], ids.int(), values - total))


def best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row and their ids, best first, the lower id first among equals that are included."""
    values, ids = logits.topk(min(count, logits.shape[1]), sorted=False)
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


# Mask, bias, penalties.

def adjust(logits: torch.Tensor, fed: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """[L, V] after mask, bias and penalties; the given logits stay as they are."""
    if not any(f"{name}.rows" in fed for name in ("mask", "bias", "penalties")):
        return logits
    logits = logits.clone()
    if "mask.rows" in fed:
        rows = fed["mask.rows"].long()
        shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = (fed["mask.bits"][:, :, None] >> shifts & 1).flatten(1)[:, :logits.shape[1]]
        logits.index_copy_(0, rows, torch.where(allowed == 1, logits.index_select(0, rows), -torch.inf))
    if "bias.rows" in fed:
        at = fed["bias.rows"].long(), fed["bias.ids"].long()
        logits.index_put_(at, fed["bias.values"], accumulate=True)
    if "penalties.rows" in fed:
        penalise(logits, {name.removeprefix("penalties."): value for name, value in fed.items()
                          if name.startswith("penalties.")}, inputs)
    return logits


def penalise(logits: torch.Tensor, p: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> None:
    """Only the entries named are touched; a row's pending input is one more of them, or counts once more."""
    rows, ids, pending = p["rows"].long(), p["ids"].long(), p["pending"]
    every, inputs = torch.arange(len(pending), device=logits.device), inputs.long()
    again = (pending[rows] > 0) & (ids == inputs[rows])
    listed = torch.zeros_like(pending).index_add_(0, rows, again.int())
    fresh = (pending > 0) & (listed == 0)
    before = logits[every, inputs]
    changed = _penalised(logits[rows, ids], p["counts"] + again, rows, p)
    once_more = _penalised(before, torch.ones_like(pending), every, p)
    logits.index_put_((rows, ids), changed)
    logits.index_put_((every, inputs), torch.where(fresh, once_more, logits[every, inputs]))


def _penalised(values: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor,
               p: Mapping[str, torch.Tensor]) -> torch.Tensor:
    repetition = p["repetition"][rows]
    values = torch.where(values > 0, values / repetition, values * repetition)
    return values - (p["presence"][rows] * (counts > 0) + p["frequency"][rows] * counts)


# Choice.

def choose(logits: torch.Tensor, fed: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """int32 [L]: rows of temperature 0 by the lowest id of the largest logit, the others drawn."""
    greedy = first_largest(logits)
    if "temperature" not in fed:
        return greedy
    drawn = fed["temperature"] > 0
    return torch.where(drawn, draw(logits, fed), greedy)


def first_largest(values: torch.Tensor) -> torch.Tensor:
    """int32 [R]: argmax, the lowest place among equals, which torch promises of no device."""
    places = torch.arange(values.shape[1], dtype=torch.int32, device=values.device)
    largest = values == values.amax(-1, keepdim=True)
    return torch.where(largest, places, values.shape[1]).amin(-1).clamp_max(values.shape[1] - 1)


def draw(logits: torch.Tensor, fed: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[R, V] adjusted logits -> int32 [R] by the inverse CDF over what is kept; 0 for a row where all are banned."""
    column = {name: fed[name][:, None] for name in ("temperature", "uniform", "top_k", "top_p", "min_p") if name in fed}
    temperature = torch.where(column["temperature"] > 0, column["temperature"], 1)
    weights = weigh(logits, logits.amax(-1, keepdim=True), temperature)
    if "top_k" in column or "top_p" in column:
        ordered = logits.sort(dim=-1, descending=True).values
        weights = torch.where(among_best(logits, ordered, kept_count(ordered, temperature, column)), weights, 0)
    if "min_p" in column:
        weights = torch.where(weights >= column["min_p"], weights, 0)
    return invert(weights, column["uniform"])


def weigh(logits: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return torch.exp((logits - torch.where(top.isinf(), 0, top)) / temperature)


def kept_count(ordered: torch.Tensor, temperature: torch.Tensor, column: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[R, 1] how many of the largest logits top-k, then top-p, keep; at least one. ordered [R, V]: the best first."""
    size, top = ordered.shape[1], ordered[:, :1]
    place = torch.arange(size, device=ordered.device)
    limit = torch.full_like(top, size, dtype=torch.int32)
    if "top_k" in column:
        limit = torch.where(column["top_k"] > 0, column["top_k"].clamp_max(size), size)
    if "top_p" not in column:
        return limit
    sums = cumulative(torch.where(place < limit, weigh(ordered, top, temperature), 0))
    before = torch.cat((torch.zeros_like(top), sums[:, :-1]), -1)
    inside = (place < limit) & ((before < column["top_p"] * sums[:, -1:]) | (column["top_p"] >= 1))
    return inside.sum(-1, keepdim=True).clamp_min(1)


def among_best(logits: torch.Tensor, ordered: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """[R, V] whether an entry is one of its row's `count` largest, of equals at the border those of the lowest ids."""
    border = ordered.gather(1, count.long() - 1)
    above, equal = logits > border, logits == border
    room = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """int32 [R]: first column whose cumulative weight exceeds uniform * total."""
    sums = cumulative(weights)
    # The last column with a weight, in case rounding puts uniform * total at or above the end of the sums.
    places = torch.arange(weights.shape[1], dtype=torch.int32, device=weights.device)
    last = torch.where(weights > 0, places, 0).amax(-1)
    place = (sums <= uniform * sums[:, -1:]).sum(-1)
    return torch.minimum(place.int(), last)


def cumulative(weights: torch.Tensor) -> torch.Tensor:
    """[R, V] inclusive sums over the last axis, blocks first."""
    count, size = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -size % BLOCK)).view(count, -1, BLOCK)
    inside = padded.cumsum(-1)
    before = torch.nn.functional.pad(inside[:, :, -1].cumsum(-1)[:, :-1], (1, 0))
    return (before[:, :, None] + inside).flatten(1)[:, :size]
