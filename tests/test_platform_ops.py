"""Every op case on every platform of the tree that can run here. Skips say why: unavailable, or unsupported."""
from __future__ import annotations

import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import numpy as np
import pytest
from isthmus.core import discovery
from isthmus.core.plan import Batch, StepResult
from isthmus.core.platform import Manifest, Unavailable
from isthmus.platforms.null.platform import check_batch

from .opcases import DTYPES, OpCase, Run, dense_cases
from .opcases_attention import attention_cases
from .opcases_sampling import sampling_cases

ASKED = ("linear", "attention", "moe")  # ops that `Platform.supports` documents
LOGPROB_ERROR = {"f64": 1e-5, "f32": 1e-4, "bf16": 1e-3}


def all_cases() -> Iterator[OpCase]:
    for dtype in DTYPES:
        yield from dense_cases(dtype)
        yield from attention_cases(dtype)
        yield from sampling_cases(dtype)


@cache
def probed(name: str) -> tuple[Any, Manifest] | Unavailable:
    """The platform, probed once for the whole run."""
    try:
        platform = discovery.load_platform(name)
        return platform, platform.probe()
    except Unavailable as error:
        return error


@cache
def ledger(name: str) -> dict[str, list[dict[str, str]]]:
    path = discovery.platform_root() / name / "ledger.toml"
    return tomllib.loads(path.read_text("utf-8")) if path.exists() else {}


def unsupported(platform: Any, manifest: Manifest, case: OpCase) -> str | None:
    """The reason why the platform does not claim this case."""
    if case.dtype not in manifest.compute_dtypes:
        return f"{case.dtype} is not computed"
    if case.op == "attention" and case.dtype not in manifest.kv_dtypes:
        return f"K and V are not kept in {case.dtype}"
    if case.page_size is not None and case.page_size not in manifest.page_sizes:
        return f"pages of {case.page_size} tokens"
    for feature in case.features:
        reason = f"no {feature}" if feature not in manifest.features else platform.supports(feature)
        if reason:
            return reason
    return platform.supports(case.op, **case.asks) if case.op in ASKED else None


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


@pytest.mark.parametrize("case", list(all_cases()), ids=str)
@pytest.mark.parametrize("name", discovery.list_platforms())
def test_op(name: str, case: OpCase, request: pytest.FixtureRequest) -> None:
    found = probed(name)
    if isinstance(found, Unavailable):
        pytest.skip(f"{name} unavailable: {found}")
    platform, manifest = found
    reason = unsupported(platform, manifest, case)
    for kind, entries in ledger(name).items():
        for entry in entries:
            if fnmatchcase(case.id, entry["case"].replace("[", "[[]")):
                if kind == "xfail":
                    request.applymarker(pytest.mark.xfail(reason=entry["reason"], strict=True, raises=AssertionError))
                else:
                    reason = reason or entry["reason"]
    if reason:
        pytest.skip(f"{name} unsupported: {reason}")
    run = case.build()
    for step, got in zip(run.steps, execute(platform, case.dtype, run), strict=True):
        if isinstance(step.expected, StepResult):
            check_result(got, step.expected, step.batch, LOGPROB_ERROR[case.dtype])
        else:
            check_values(got[:step.tokens], step.expected, case.nmse)


def test_every_batch_keeps_its_promises() -> None:
    for case in all_cases():
        run = case.build()
        for step in run.steps:
            check_batch(step.batch, run.state.page_size, None)


def test_every_op_and_feature_has_a_case() -> None:
    cases = list(all_cases())
    assert len({case.id for case in cases}) == len(cases)
    assert {case.op for case in cases} == {"embed", "linear", "rms_norm", "rope", "attention", "act_mul", "moe",
                                           "all_reduce", "sample"}
    claimed = {feature for case in cases for feature in case.features}
    assert claimed == {"sliding_window", "softcap", "logprobs", "penalties", "logit_bias", "grammar_mask", "moe",
                       "export_pages"}
