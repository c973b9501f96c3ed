"""Comparisons that raise `Wrong` with numbers."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.plan import Batch, StepResult
from .case import Wrong

Place = Callable[[tuple[int, ...]], str]  # what an index is about, in words
LOGPROB_ERROR = {"f64": 1e-5, "f32": 1e-4, "f16": 1e-3 / 8, "bf16": 1e-3}  # f16 has 3 bits more than bf16


def check_values(got: Any, expected: np.ndarray, limit: float, what: str = "values",
                 place: Place | None = None) -> None:
    """Normalised mean squared error: sum of (got - expected)^2 over sum of expected^2, at most `limit`."""
    if not isinstance(got, np.ndarray) or got.dtype not in (np.float32, np.float64):
        kind = " ".join(map(str, filter(None, (type(got).__name__, getattr(got, "dtype", None)))))
        raise Wrong(f"{what}: collected {kind}, not numpy float32 or float64")
    if got.shape != expected.shape:
        raise Wrong(f"{what}: shape {got.shape}, expected {expected.shape}")
    finite = np.isfinite(got)
    if not finite.all():
        at = first(~finite)
        raise Wrong(f"{what}: {(~finite).sum()} of {got.size} values are not finite, the first at "
                    f"{_shown(at, ~finite, place)}", tolerance=limit, index=at)
    squares = np.square(got.astype(np.float64) - expected)
    scale = np.square(expected).sum()
    error = float(squares.sum() / scale) if scale else float(squares.sum())
    if not error <= limit:
        bad = squares > limit * max(scale, 1e-300) / expected.size
        at = first(bad)
        raise Wrong(f"{what}: {got[at]:.6g} at {_shown(at, bad, place)}, expected {expected[at]:.6g}; "
                    f"NMSE {error:.1e}, at most {limit:.0e}", error, limit, at)


def _shown(at: tuple[int, ...], bad: np.ndarray, place: Place | None) -> str:
    """The first bad index, and in words where it is and how many tokens are bad, if that is known."""
    if place is None:
        return str(list(at))
    tokens = bad.reshape(len(bad), -1).any(axis=1)
    return f"{list(at)} ({place(at)}; {tokens.sum()} of {len(tokens)} tokens are off)"


def first(bad: np.ndarray) -> tuple[int, ...]:
    """The index of the first true value."""
    return tuple(np.argwhere(bad)[0].tolist())


def check_equal(got: Any, expected: Any, what: str, place: Place | None = None) -> None:
    """Integers that must be the same."""
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape:
        raise Wrong(f"{what}: shape {got.shape}, expected {expected.shape}")
    if (got != expected).any():
        at = first(got != expected)
        told = f" ({place(at)})" if place else ""
        raise Wrong(f"{what}: {got[at]} at {list(at)}{told}, expected {expected[at]}", index=at)


def check_near(got: Any, expected: np.ndarray, limit: float, what: str) -> None:
    """Every value within `limit` of the expected one."""
    got = np.asarray(got)
    if got.shape != expected.shape:
        raise Wrong(f"{what}: shape {got.shape}, expected {expected.shape}")
    off = ~(np.abs(got - expected) <= limit)
    if off.any():
        at = first(off)
        raise Wrong(f"{what}: {got[at]:.6g} at {list(at)}, expected {expected[at]:.6g} within {limit:g}",
                    tolerance=limit, index=at)


def check_result(got: StepResult, expected: StepResult, batch: Batch, limit: float) -> None:
    """A step's result in its real logit rows; of top ids only those that no other is within `limit` of."""
    real = batch.targets != -2
    for name, kind in (("tokens", np.int32), ("top_ids", np.int32), ("logprobs", np.float32),
                       ("top_logprobs", np.float32)):
        part = getattr(got, name)
        if part is not None and getattr(part, "dtype", None) != kind:
            raise Wrong(f"{name} is {type(part).__name__} {getattr(part, 'dtype', '')}, not numpy {kind.__name__}")
    rows = np.flatnonzero(real)

    def place(index: tuple[int, ...]) -> str:
        row = int(rows[index[0]])
        return f"logit row {row}, sequence slot {batch.seqs[batch.rows[batch.logit_rows[row]]]}"
    check_equal(got.tokens[real], expected.tokens[real], "tokens", place)
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
