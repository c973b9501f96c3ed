"""Every op case on every platform of the tree that can run here. Skips say why: unavailable, or unsupported."""
from __future__ import annotations

import pytest
from isthmus.conformance import Case, law_state
from isthmus.conformance.law_ops import OPS, cases, op_cases
from isthmus.core import discovery
from isthmus.core.platform import FEATURES
from isthmus.platforms.null.platform import check_batch

from .conforming import hold

COST = 20  # seconds


@pytest.mark.parametrize("case", list(cases()), ids=str)
@pytest.mark.parametrize("name", discovery.list_platforms())
def test_op(name: str, case: Case) -> None:
    hold(name, case)


def test_every_batch_keeps_its_promises() -> None:
    for case in op_cases():
        run = case.build(0)
        for step in run.steps:
            check_batch(step.batch, run.state.page_size, None)


def test_every_op_and_feature_has_a_case() -> None:
    listed = list(op_cases())
    assert len({case.id for case in listed}) == len(listed)
    assert {case.op for case in listed} == set(OPS)
    claimed = {feature for case in listed for feature in case.features}
    assert claimed == set(FEATURES) - {"overlap", "late_mask", "adapters"}, (
        "which the laws compile, scheduler, state and model show")
    assert any("late_mask" in case.needs.features for case in law_state.cases())
