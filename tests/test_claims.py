"""What a platform claims and no case shows makes a whole run of the conformance suite fail, and is named."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from isthmus.conformance import Case, Ledger, Needs, laws, run_suite
from isthmus.conformance.ledger import Entry
from isthmus.core.platform import Manifest, Unsupported
from isthmus.platforms.reference.platform import Platform as Reference

MANIFEST = dict(compute_dtypes=("f64", "f32"), kv_dtypes=("f64",), formats=("q4_0",), page_sizes=(16, 4),
                features=frozenset({"moe", "softcap"}))


def nothing(context: Any) -> None:
    """A case that passes."""


def later(context: Any) -> None:
    raise Unsupported("not on Sundays")


def a_case(id: str, law: str = "ops", op: str = "linear", dtype: str = "f64", check: Any = nothing, format: str = "",
           **needs: Any) -> Case:
    return Case(id, law, op, Needs(dtype, **needs), check, format=format)


WHOLE = [a_case("linear[q4_0,f64]", format="q4_0"), a_case("linear[f32]", dtype="f32"),
         a_case("model[f64]", "model", "llama"), a_case("model[f32]", "model", "llama", "f32"),
         a_case("attention[f64]", op="attention", kv="f64", page_size=16, features=("softcap",)),
         a_case("attention[page4]", op="attention", kv="f64", page_size=4), a_case("moe", op="moe", features=("moe",))]


class Claiming(Reference):
    """The reference with another manifest, and formats that it refuses."""

    claims: dict[str, Any] = {}
    refused: tuple[str, ...] = ()

    def __init__(self, options: Any = None):
        super().__init__({})

    def probe(self, rank: int = 0, world: int = 1) -> Manifest:
        return replace(super().probe(), **MANIFEST | self.claims)

    def supports(self, op: str, **case: Any) -> str | None:
        return "no kernel" if case.get("format") in self.refused else None


@pytest.fixture
def unproved(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """unproved(cases, ledger, refused=..., field=words): lines of a whole run; it holds only without any."""
    def run(cases: list[Case], ledger: Ledger | None = None, refused: tuple[str, ...] = (), **claims: Any) -> list[str]:
        monkeypatch.setattr(laws, "LAWS", {"ops": lambda: iter(cases)})
        kind = type("Made", (Claiming,), {"claims": claims, "refused": refused})
        report = run_suite(kind, ledger=ledger or Ledger())
        lines = report.unproved()
        assert report.ok == (not lines) and all(line in report.as_markdown() for line in lines)
        assert report.as_dict()["unproved"] == lines
        return lines
    yield run


def test_what_every_claim_has_a_passed_case_for_holds(unproved):
    assert unproved(WHOLE) == []


@pytest.mark.parametrize("claim, told", [
    ({"features": frozenset({"moe", "softcap", "overlap"})}, "features 'overlap' (there is no case for it)"),
    ({"formats": ("q4_0", "q6_k")}, "formats 'q6_k' (there is no case for it)"),
    ({"kv_dtypes": ("f64", "f8_e4m3")}, "kv_dtypes 'f8_e4m3' (there is no case for it)"),
    ({"page_sizes": (16, 4, 512)}, "page_sizes 512 (there is no case for it)"),
    ({"compute_dtypes": ("f64", "f32", "f16")},
     "compute_dtypes 'f16' (there is no case of the law model and ops for it)"),
])
def test_a_claim_without_a_case_is_named(unproved, claim, told):
    assert unproved(WHOLE, **claim) == [f"claimed but never shown: {told}"]


@pytest.mark.parametrize("gone, told", [
    ("moe", "features 'moe' (no case passed, of 1: not on Sundays)"),
    ("attention[page4]", "page_sizes 4 (no case passed, of 1: not on Sundays)"),
    ("linear[q4_0,f64]", "formats 'q4_0' (no case passed, of 1: not on Sundays)"),
    ("model[f32]", "compute_dtypes 'f32' (no case of the law model passed, of 1: not on Sundays)"),
    ("linear[f32]", "compute_dtypes 'f32' (no case of the law ops passed, of 1: not on Sundays)"),
])
def test_a_claim_whose_cases_are_all_unsupported_is_named(unproved, gone, told):
    """By the platform while the case runs, or by its ledger."""
    cases = [replace(case, check=later) if case.id == gone else case for case in WHOLE]
    assert unproved(cases) == [f"claimed but never shown: {told}"]
    assert unproved(WHOLE, Ledger(unsupported=(Entry(gone, "not on Sundays"),))) == [f"claimed but never shown: {told}"]
    assert unproved([*cases, next(case for case in WHOLE if case.id == gone)]) == [], "one that passes is enough"


def test_an_expected_failure_shows_nothing(unproved):
    def wrong(context: Any) -> None:
        raise AssertionError("off by one")
    cases = [replace(case, check=wrong) if case.id == "moe" else case for case in WHOLE]
    [line] = unproved(cases, Ledger(xfail=(Entry("moe", "known"),)))
    assert line == "claimed but never shown: features 'moe' (no case passed, of 1: known (off by one))"


def test_a_format_that_load_expands_is_not_kept(unproved):
    [line] = unproved(WHOLE, refused=("q4_0",))
    assert line == "claimed but never shown: formats 'q4_0' (no case passed, of 1: expanded at load)"


def test_ops_of_the_manifest_file_are_claims(monkeypatch):
    """The reference's own file offers all nine."""
    monkeypatch.setattr(laws, "LAWS", {"ops": lambda: iter(WHOLE)})
    lines = run_suite("reference", ledger=Ledger()).unproved()
    missing = [line for line in lines if line.startswith("claimed but never shown: ops ")]
    assert missing == [f"claimed but never shown: ops {op!r} (there is no case for it)" for op in
                       ("embed", "rms_norm", "rope", "act_mul", "all_reduce", "sample")]


def test_a_part_of_the_cases_need_not_show_everything(monkeypatch):
    monkeypatch.setattr(laws, "LAWS", {"ops": lambda: iter(WHOLE)})
    report = run_suite(Claiming, only=["moe"], ledger=Ledger())
    assert report.ok and report.unproved() == []


def test_the_kit_has_a_case_for_every_feature_op_and_kept_format():
    """Of the platforms in this tree, as their files claim them."""
    from isthmus.core import manifests
    cases = laws.all_cases()
    for name, claim in manifests.read_claims().items():
        if name == "null":
            continue
        assert set(claim.formats) <= {case.format for case in cases}, name
        assert set(claim.features) <= {word for case in cases for word in case.needs.features}, name
        assert set(claim.page_sizes) <= {case.needs.page_size for case in cases}, name
        assert set(claim.kv_dtypes) <= {case.needs.kv for case in cases}, name
        assert set(claim.ops) <= {case.op for case in cases if case.law == "ops"}, name
