"""Negative controls of the conformance suite: every broken platform must be caught by the law that it breaks."""
from __future__ import annotations

import numpy as np
import pytest
from isthmus.conformance import Ledger, Outcome, run_suite

from .platform_mutants import (
    ALL,
    CLAIMS,
    HALF,
    HALVES,
    KEEPERS,
    OPS,
    OTHERS,
    STATE,
    Mutant,
)

COST = 40  # seconds
FAILED = (Outcome.WRONG, Outcome.ERROR)


@pytest.fixture(autouse=True)
def quiet():
    """Broken arithmetic warns; no module of a broken copy stays."""
    with np.errstate(all="ignore"):
        yield
    Mutant.forget()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mutant", ALL, ids=lambda m: m.name)
def test_mutant_is_caught(mutant: Mutant, tmp_path):
    report = run_suite(mutant.load(tmp_path), only=mutant.only, ledger=Ledger(), stop_early=True)
    caught = {result.case.law for result in report.results if result.outcome in FAILED}
    assert caught == {mutant.law}, f"survived {len(report.results)} cases of {', '.join(mutant.only)}"
    assert mutant.told in report.results[-1].reason


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mutants, edits", [([*OPS, *CLAIMS, *STATE, *OTHERS], ()), (HALVES, HALF), (KEEPERS, ())],
                         ids=["as it is", "in f16 too", "every dtype of K and V"])
def test_the_copy_itself_is_whole(mutants, edits, tmp_path):
    """What catches the mutants lets the unbroken copy pass, and every case that is named is run."""
    only = sorted({pattern for mutant in mutants for pattern in mutant.only})
    report = run_suite(Mutant("none", "", (), edits).load(tmp_path), only=only, ledger=Ledger())
    assert not [r for r in report.results if r.outcome not in (Outcome.PASSED, Outcome.UNSUPPORTED)]
    assert {r.case.law for r in report.results if r.outcome is Outcome.PASSED} == {mutant.law for mutant in mutants}


def test_mutants_have_names_of_their_own():
    assert len(ALL) >= 20 and len({mutant.name for mutant in ALL}) == len(ALL)
