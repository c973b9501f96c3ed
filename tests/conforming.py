"""The conformance kit under pytest: one platform of each name for the whole run, outcomes as pytest tells them."""
from __future__ import annotations

from functools import cache

import pytest
from isthmus.conformance import Case, Context, Ledger, Outcome, ledger_of, run_case
from isthmus.core.discovery import load_platform
from isthmus.core.platform import Unavailable

# Whole tiny models: a second thread costs more than it gives, the more so with other tests beside.
ONE_THREAD = {"cpu": {"threads": "1"}}


@cache
def context_of(name: str, alone: bool) -> tuple[Context, Ledger] | Unavailable:
    try:
        options = {} if alone else ONE_THREAD.get(name, {})
        platform = load_platform(name, options)
        ledger = ledger_of(platform)
        return Context(platform, platform.probe(), make=lambda: load_platform(name, options), name=name), ledger
    except Unavailable as error:
        return error


def hold(name: str, case: Case) -> None:
    """Run one case on the platform called `name`: pass, skip with the reason, xfail, or fail with the numbers."""
    found = context_of(name, case.law == "ops")
    if isinstance(found, Unavailable):
        pytest.skip(f"{name} unavailable: {found}")
    result = run_case(found[0], case, found[1])
    if result.outcome is Outcome.UNSUPPORTED:
        pytest.skip(f"{name} unsupported: {result.reason}")
    if result.outcome is Outcome.EXPECTED:
        pytest.xfail(result.reason)
    assert result.outcome is Outcome.PASSED, f"{result.outcome}: {result.reason}"
