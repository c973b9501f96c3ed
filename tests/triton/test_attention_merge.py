"""Joining partial attention results: exact against one softmax over all keys, stable, blind to what was not written."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from .attention_cases import check
from .interpreter import prepare

COST = 2  # seconds
DEVICE = prepare()
from isthmus.platforms.triton_kit.merge import merge_splits, merge_states  # noqa: E402


def part(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Attention over one set of keys: scores [n], values [n, d]."""
    if np.max(scores, initial=-np.inf) == -np.inf:
        return np.full(values.shape[1], np.nan), np.array(-np.inf)  # what empty parts leave unwritten
    lse = scores.max() + np.log(np.exp(scores - scores.max()).sum())
    return np.exp(scores - lse) @ values, lse


def split(sizes: list[int], width: int = 8, offset: float = 0.0, seed: int = 0):
    """Parts [splits, d], their lse [splits], and the right result over all keys."""
    rng = np.random.default_rng(seed)
    scores, values = rng.normal(size=sum(sizes)) * 3 + offset, rng.normal(size=(sum(sizes), width))
    edges = np.cumsum([0, *sizes])
    parts = [part(scores[a:b], values[a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    right = part(scores, values) if sum(sizes) else (np.zeros(width), np.array(-np.inf))
    return np.stack([p[0] for p in parts]), np.stack([p[1] for p in parts]), right, (scores, values)


def device(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.tensor(x, dtype=torch.float32, device=DEVICE) for x in arrays]


@pytest.mark.parametrize("sizes", [[3, 4], [0, 5], [5, 0], [0, 0], [1, 1]])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_two_states(sizes, offset):
    parts, lse, (right, right_lse), _ = split(sizes, 24, offset)
    o_a, o_b, lse_a, lse_b = device(parts[0][None, None], parts[1][None, None], lse[0][None, None], lse[1][None, None])
    out, merged = merge_states(o_a, lse_a, o_b, lse_b)
    tolerance = 1e-5 if offset == 0 else 2e-3  # float32 holds an lse of 1e4 to 1e-3
    check(out[0, 0], right, tolerance)
    check(merged[0, 0], right_lse, 1e-5)


def test_states_of_very_different_size_and_many_heads():
    rng = np.random.default_rng(1)
    o_a, o_b = rng.normal(size=(2, 3, 5, 16))
    lse_a, lse_b = rng.normal(size=(3, 5)) - 200, rng.normal(size=(3, 5)) + 200
    lse_a[1], lse_b[1] = lse_b[1].copy(), lse_a[1].copy()
    out, lse = merge_states(*device(o_a, lse_a, o_b, lse_b))
    check(out, np.where((lse_a > lse_b)[..., None], o_a, o_b), 1e-6)
    check(lse, np.maximum(lse_a, lse_b), 1e-6)


def test_states_keep_their_type_and_must_fit():
    a, lse = torch.ones(2, 3, 16, dtype=torch.bfloat16, device=DEVICE), torch.zeros(2, 3, device=DEVICE)
    out, _ = merge_states(a, lse, 3 * a, lse)
    assert out.dtype == torch.bfloat16 and bool((out == 2).all())
    with pytest.raises(ValueError, match="cannot merge"):
        merge_states(a, lse, a[:1], lse)
    with pytest.raises(ValueError, match="contiguous"):
        merge_states(a, lse, a, torch.zeros(3, 2, device=DEVICE).T)


@pytest.mark.parametrize("sizes", [[4], [3, 4, 5], [0, 3, 0], [0, 0, 0], [2] * 9, [0] * 8 + [3], [3] + [0] * 8])
@pytest.mark.parametrize("sink", [None, 2.0, 50.0, -np.inf])
def test_splits(sizes, sink):
    width = 512 if len(sizes) > 3 else 24  # 512: more splits than are read at a time
    parts, lse, (right, right_lse), (scores, values) = split(sizes, width)
    if sink is not None:
        right, right_lse = part(np.append(scores, sink), np.vstack([values, np.zeros(width)]))
    if not sum(sizes):
        right, right_lse = np.zeros(width), np.array(-np.inf if sink is None else sink)
    part_in, lse_in = device(parts[None, None], lse[None, None])
    out, merged = torch.empty(1, 1, width, device=DEVICE), torch.empty(1, 1, device=DEVICE)
    merge_splits(part_in, lse_in, out, merged, None if sink is None else device(np.array([sink]))[0])
    check(out[0, 0], right, 1e-5)
    check(merged[0, 0], right_lse, 1e-5)
