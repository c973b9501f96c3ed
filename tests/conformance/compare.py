"""Comparisons that raise `Wrong` with numbers."""
from __future__ import annotations

from typing import Any

import numpy as np

from ..core.plan import Batch, StepResult
from .case import Wrong

LOGPROB_ERROR = {"f64": 1e-5, "f32": 1e-4, "bf16": 1e-3}


def check_values(got: Any, expected: np.ndarray, limit: float, what: str = "values") -> None:
    """Normalised mean squared error: sum of (got - expected)^2 over sum of expected^2, at most `limit`."""
    if not isinstance(got, np.ndarray) or got.dtype not in (np.float32, np.float64):
        raise Wrong(f"{what}: collected {type(got).__name__} {getattr(got, 'dtype', '')}, not numpy float32 or float64")
    if got.shape != expected.shape:
        raise Wrong(f"{what}: shape {got.shape}, expected {expected.shape}")
    finite = np.isfinite(got)
    if not finite.all():
        raise Wrong(f"{what}: {(~finite).sum()} of {got.size} values are not finite", tolerance=limit,
                    index=first(~finite))
    squares = np.square(got.astype(np.float64) - expected)
    scale = np.square(expected).sum()
    error = float(squares.sum() / scale) if scale else float(squares.sum())
    if not error <= limit:
        place = first(squares > limit * max(scale, 1e-300) / expected.size)
        raise Wrong(f"{what}: {got[place]:.6g} at {list(map(int, place))}, expected {expected[place]:.6g}; "
                    f"NMSE {error:.1e}, at most {limit:.0e}", error, limit, place)


def first(bad: np.ndarray) -> tuple[int, ...]:
    """The index of the first true value."""
    return tuple(np.argwhere(bad)[0].tolist())


def check_equal(got: Any, expected: Any, what: str) -> None:
    """Integers that must be the same."""
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape:
        raise Wrong(f"{what}: shape {got.shape}, expected {expected.shape}")
    if (got != expected).any():
        place = first(got != expected)
        raise Wrong(f"{what}: {got[place]} at {list(map(int, place))}, expected {expected[place]}", index=place)


def check_near(got: Any, expected: np.ndarray, limit: float, what: str) -> None:
    """Every value within `limit` of the expected one."""
    got = np.asarray(got)
    if got.shape != expected.shape:
        raise Wrong(f"{what}: shape {got.shape}, expected {expected.shape}")
    off = ~(np.abs(got - expected) <= limit)
    if off.any():
        place = first(off)
        raise Wrong(f"{what}: {got[place]:.6g} at {list(map(int, place))}, expected {expected[place]:.6g} within "
                    f"{limit:g}", tolerance=limit, index=place)


def check_result(got: StepResult, expected: StepResult, batch: Batch, limit: float) -> None:
    """A step's result in its real logit rows; of top ids only those that no other is within `limit` of."""
    real = batch.targets != -2
    check_equal(got.tokens[real], expected.tokens[real], "tokens")
    if expected.logprobs is None:
        return
    if got.logprobs is None or got.top_ids is None or got.top_logprobs is None:
        raise Wrong("log-probabilities were asked for and not given")
    check_near(got.logprobs[real], expected.logprobs[real], limit, "logprobs")
    check_near(got.top_logprobs[real], expected.top_logprobs[real], limit, "top_logprobs")
    for have, want, values in zip(got.top_ids[real], expected.top_ids[real], expected.top_logprobs[real], strict=True):
        if len(set(have.tolist())) != len(want):
            raise Wrong(f"top_ids {have.tolist()} repeat")
        clear = np.array([np.sum(np.abs(values - value) < limit) == 1 for value in values], bool)
        clear[-1:] = False  # the last of the list may tie with one outside it
        check_equal(have[clear], want[clear], "top_ids")
