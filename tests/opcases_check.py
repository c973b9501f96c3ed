"""Running an op case on a platform, through nothing but the neck, and comparing what comes out."""
from __future__ import annotations

from typing import Any

import numpy as np
from isthmus.core.plan import Batch, StepResult

from .opcases import OpCase, Run

LOGPROB_ERROR = {"f64": 1e-5, "f32": 1e-4, "bf16": 1e-3}


def execute(platform: Any, dtype: str, run: Run) -> list[StepResult | np.ndarray]:
    """Launch every step, then collect: no step may need a look at the one before."""
    weights = {name: platform.load(raws, spec, dtype) for name, (raws, spec) in run.weights.items()}
    state = platform.alloc(run.state, run.pages)
    launched = []
    for step in run.steps:
        if step.before is not None:
            state = step.before(platform, state)
        out, state = platform.compile(step.forward, weights, None)(state, step.batch)
        launched.append(out)
    return [out.collect() for out in launched]


def check_values(got: Any, expected: np.ndarray, limit: float) -> None:
    assert isinstance(got, np.ndarray) and got.dtype in (np.float32, np.float64), f"collected a {type(got)}"
    assert got.shape == expected.shape
    assert np.isfinite(got).all(), f"{(~np.isfinite(got)).sum()} of {got.size} values are not finite"
    error = np.square(got - expected).sum() / np.square(expected).sum()
    assert error <= limit, f"normalised mean squared error {error:.1e}, the limit is {limit:.0e}"


def check_result(got: StepResult, expected: StepResult, batch: Batch, limit: float) -> None:
    real = batch.targets != -2
    np.testing.assert_array_equal(got.tokens[real], expected.tokens[real])
    if expected.logprobs is None:
        return
    np.testing.assert_allclose(got.logprobs[real], expected.logprobs[real], rtol=0, atol=limit)
    np.testing.assert_allclose(got.top_logprobs[real], expected.top_logprobs[real], rtol=0, atol=limit)
    for have, want, values in zip(got.top_ids[real], expected.top_ids[real], expected.top_logprobs[real], strict=True):
        assert len(set(have.tolist())) == len(want)
        clear = np.array([np.sum(np.abs(values - value) < limit) == 1 for value in values], bool)
        clear[-1:] = False  # the last of the list may tie with one outside it
        np.testing.assert_array_equal(have[clear], want[clear])


def check_case(platform: Any, case: OpCase) -> None:
    """Raises AssertionError where the platform and the case disagree."""
    run = case.build()
    for step, got in zip(run.steps, execute(platform, case.dtype, run), strict=True):
        if isinstance(step.expected, StepResult):
            check_result(got, step.expected, step.batch, LOGPROB_ERROR[case.dtype])
        else:
            check_values(got[:step.tokens], step.expected, case.nmse)
