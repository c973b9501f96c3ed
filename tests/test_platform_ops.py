"""Every op case on every platform of the tree that can run here. Skips say why: unavailable, or unsupported."""
from __future__ import annotations

import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest
from isthmus.core import discovery
from isthmus.core.platform import Manifest, Unavailable, Unsupported
from isthmus.platforms.null.platform import check_batch

from .opcases import DTYPES, OpCase, dense_cases
from .opcases_attention import attention_cases
from .opcases_check import check_case
from .opcases_sampling import sampling_cases

ASKED = ("attention", "moe")  # not linear: what has no kernel is expanded by `load`, and must be right too


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
    try:
        check_case(platform, case)
    except Unsupported as error:
        pytest.skip(f"{name} unsupported: {error}")


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
