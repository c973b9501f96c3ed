"""The conformance kit: every law on every platform that can run here (ops are in test_platform_ops), and the kit's own
promises: outcomes that are never confused, strict ledgers, reports, an installed package as the platform.
"""
from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from isthmus.conformance import (
    LAWS,
    Case,
    Ledger,
    Needs,
    Outcome,
    Refused,
    Wrong,
    all_cases,
    laws,
    read_ledger,
    run_suite,
)
from isthmus.conformance.compare import check_values
from isthmus.conformance.formats import BLOCKS, decode, quantized, rounding
from isthmus.conformance.kept import BITS, kept
from isthmus.conformance.opcase import NMSE
from isthmus.core import discovery
from isthmus.core.platform import FEATURES, Unavailable, Unsupported
from isthmus.platforms.reference.platform import Platform as Reference

from .conforming import hold
from .tiny_mlx import pack_codes

COST = 58  # seconds
OTHERS = [case for case in all_cases() if case.law != "ops"]


@pytest.mark.parametrize("case", OTHERS, ids=str)
@pytest.mark.parametrize("name", discovery.list_platforms())
def test_law(name: str, case: Case) -> None:
    hold(name, case)


# ---- the cases

def test_cases_have_ids_of_their_own_and_need_capabilities_only() -> None:
    cases = all_cases()
    assert len({case.id for case in cases}) == len(cases)
    assert {case.law for case in cases} == set(LAWS) == {"manifest", "ops", "model", "state", "compile", "parallel",
                                                         "scheduler", "drafts"}
    assert {feature for case in cases for feature in case.needs.features} == set(FEATURES)
    names = set(discovery.list_platforms())
    assert not [case.id for case in cases if names & {case.op, *case.needs.words()}]


def test_only_takes_laws_ops_and_patterns() -> None:
    assert {case.law for case in all_cases(["state"])} == {"state"}
    assert {case.op for case in all_cases(["rope"])} == {"rope"}
    assert [case.id for case in all_cases(["linear[q4_1+q8_0,T4,*32]"])] == ["linear[q4_1+q8_0,T4,f32]"]
    with pytest.raises(ValueError, match="'dance' is no law and no case; laws: manifest, ops"):
        all_cases(["rope", "dance"])


@pytest.mark.parametrize("name", BLOCKS)
def test_decoder_equals_the_gguf_library(name: str) -> None:
    length, nbytes, _, _ = BLOCKS[name]
    kind = gguf.GGMLQuantizationType[name.upper()]
    assert gguf.GGML_QUANT_SIZES[kind] == (length, nbytes)
    raw, values = quantized(np.random.default_rng(1), name, (24, 512))
    want = gguf.quants.dequantize(raw.data.reshape(24, -1), kind).astype(np.float64)
    np.testing.assert_allclose(values, want, rtol=1e-5, atol=1e-6)  # the library computes in float32
    np.testing.assert_array_equal(decode(name, raw.data, raw.shape), values)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_affine_codes_are_packed_as_by_mlx(bits: int) -> None:
    raw, values = quantized(np.random.default_rng(2), f"affine{bits}_32", (6, 64))
    scale, bias = (np.repeat(part.data.view("<f2").reshape(part.shape).astype(float), 32, -1) for part in raw.extra)
    codes = np.rint((values - bias) / scale).astype(np.int64)
    np.testing.assert_array_equal(raw.data, pack_codes(codes, bits).view(np.uint8).reshape(-1))
    assert codes.max() == 2 ** bits - 1 and codes.min() == 0


@pytest.mark.parametrize("name", ["f8_e4m3", "f8_e5m2"])
def test_8_bit_floats_are_rounded_as_by_torch(name: str) -> None:
    """Torch gives NaN or infinity beyond the range, where a cache keeps the largest value."""
    torch = pytest.importorskip("torch")
    kind = {"f8_e4m3": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2}[name]
    rng = np.random.default_rng(3)
    values = np.concatenate([rng.normal(size=4000) * 10.0 ** rng.uniform(-8, 2, 4000), [0, 448, -440, 2.0 ** -9]])
    values = values.clip(-448, 448).astype(np.float32).astype(np.float64)
    want = torch.tensor(values, dtype=torch.float32).to(kind).to(torch.float64).numpy()
    np.testing.assert_array_equal(kept(values, name), want)
    largest = torch.finfo(kind).max
    np.testing.assert_array_equal(kept(np.array([1e6, -1e6, np.inf]), name), [largest, -largest, largest])


def test_codes_of_i8_have_a_scale_for_each_vector() -> None:
    values = np.random.default_rng(4).normal(size=(5, 2, 32)) * 10.0 ** np.arange(-2, 3)[:, None, None]
    values[1, 1] = 0
    left, step = kept(values, "i8"), np.abs(values).max(-1, keepdims=True) / 127
    assert (np.abs(left - values) <= step * 0.5001).all() and (left[1, 1] == 0).all()
    assert all(len(np.unique(vector)) <= 32 for vector in left.reshape(-1, 32))
    np.testing.assert_allclose(left / np.where(step, step, 1), np.rint(left / np.where(step, step, 1)), atol=1e-4)


@pytest.mark.parametrize("dtype", [dtype for dtype in BITS if dtype not in ("f64", "i8")])
def test_limits_follow_from_the_significand(dtype: str) -> None:
    """One rounding of normal values makes between a fifth and a tenth of what K and V in the dtype may be off by."""
    values = np.random.default_rng(5).normal(size=100_000)
    error = np.square(kept(values, dtype) - values).sum() / np.square(values).sum()
    limit = rounding(NMSE["bf16"] / 8, BITS[dtype])
    assert limit / 10 < error < limit / 4, (error, limit)


def test_another_seed_makes_other_inputs_and_the_same_seed_the_same() -> None:
    for case in laws.law_ops.op_cases():
        if case.id in ("linear[q4_k,T5,f32]", "attention[gqa,6/2x32,page4,f32]", "sample[top_p,f32]"):
            first, again, other = (case.build(seed).weights for seed in (3, 3, 4))
            data = [[raw.data.tobytes() for raws, _ in run.values() for raw in raws] for run in (first, again, other)]
            assert data[0] == data[1] != data[2]


def test_the_reference_holds_with_any_seed() -> None:
    report = run_suite("reference", only=["*f32]"], seed=12345)
    assert report.ok and report.counts()[Outcome.PASSED] > 150, report.failures()[:5]


# ---- outcomes

class Vendor(Reference):
    """The reference, from somewhere else."""


class Mistaken(Vendor):
    """Copies nothing, and has no mixture of experts."""

    def copy_pages(self, state: Any, src: Any, dst: Any) -> Any:
        return state

    def supports(self, op: str, **case: Any) -> str | None:
        return "no experts on this chip" if op == "moe" else super().supports(op, **case)

    def compile(self, forward: Any, weights: Any, bucket: Any) -> Any:
        if "down" in weights:
            raise RuntimeError("out of registers")
        return super().compile(forward, weights, bucket)


def outcome(platform: Any, only: str, ledger: Ledger | None = None) -> list[tuple[str, str]]:
    report = run_suite(platform, only=[only], ledger=ledger or Ledger())
    return [(result.outcome.value, result.reason) for result in report.results]


def test_wrong_error_and_unsupported_are_told_apart() -> None:
    [(kind, reason)] = outcome(Mistaken, "attention[copied_pages,4*f64]")
    assert kind == "wrong" and "launch 2" in reason and "NMSE" in reason
    assert outcome(Mistaken, "moe[ties,softmax,f64]") == [("unsupported", "no experts on this chip")]
    assert outcome(Mistaken, "moe[ties,softmax,bf16]") == [("unsupported", "bf16 is not computed")]
    [(kind, reason)] = outcome(Mistaken, "rope[3x64*f64]")
    assert (kind, reason) == ("passed", "")


def test_a_wrong_value_comes_with_numbers() -> None:
    report = run_suite(Mistaken, only=["state[copied,page4,f64]"], ledger=Ledger())
    [result] = report.results
    assert result.numbers["nmse"] > result.numbers["tolerance"] == 1e-12 and len(result.numbers["index"]) == 3
    with pytest.raises(Wrong, match=r"values: 2 at \[1\], expected 1; NMSE 5.0e-01, at most 1e-01") as caught:
        check_values(np.array([1.0, 2.0]), np.array([1.0, 1.0]), 0.1)
    assert caught.value.index == (1,)
    for bad in (np.array([1.0, np.nan]), np.array([1.0]), np.array([1, 1]), None):
        with pytest.raises(Wrong):
            check_values(bad, np.array([1.0, 1.0]), 0.1)


class Broken(Vendor):
    def load(self, raws: Any, spec: Any, dtype: str) -> Any:
        if spec.role == "norm":
            raise RuntimeError("out of registers")
        if spec.role == "bias":
            raise Unsupported("biases live elsewhere")
        return super().load(raws, spec, dtype)


class Absent(Vendor):
    def probe(self, rank: int = 0, world: int = 1) -> Any:
        raise Unavailable("the cable is not plugged in")


def test_exceptions_of_a_platform_are_findings() -> None:
    [(kind, reason), *_] = outcome(Broken, "rms_norm[*f64]")
    assert kind == "error" and reason.startswith("RuntimeError: out of registers (test_conformance.py:")
    assert outcome(Broken, "linear[f32,T1,bias,f64]") == [("unsupported", "biases live elsewhere")]
    assert outcome(Absent, "all_reduce*f64]") == [("unavailable", "the cable is not plugged in")]
    assert not run_suite(Absent, only=["all_reduce"], ledger=Ledger()).ok


def ledger_file(folder: Path, text: str) -> Ledger:
    (folder / "ledger.toml").write_text(text, "utf-8")
    return read_ledger(folder / "ledger.toml")


def test_the_ledger_is_strict(tmp_path: Path) -> None:
    ledger = ledger_file(tmp_path, """
[[xfail]]
case = "attention[copied*]"
reason = "DMA is off by a bank"
[[xfail]]
case = "rms_norm[*]"
reason = "no registers"
error = "out of registers"
[[unsupported]]
case = "rope[*]"
reason = "no angles"
""")
    copied = "attention[copied_pages,4*f64]"
    [(kind, reason)] = outcome(Mistaken, copied, ledger)
    assert kind == "expected failure" and reason.startswith("DMA is off by a bank (launch 2")
    [(kind, reason)] = outcome(Vendor, copied, ledger)
    assert kind == "unexpected pass" and "remove its entry 'attention[copied*]'" in reason
    assert not run_suite(Vendor, only=[copied], ledger=ledger).ok
    assert {kind for kind, _ in outcome(Broken, "rms_norm[*f64]", ledger)} == {"expected failure"}
    assert outcome(Vendor, "rope[1x128*f64]", ledger) == [("unsupported", "no angles")]
    assert ledger.stale(all_cases(["attention", "rope"])) == ["rms_norm[*]"]
    with pytest.raises(ValueError, match="ledger.toml: unknown table skip; there are: unsupported, xfail"):
        ledger_file(tmp_path, "[[skip]]\ncase = 'a'\nreason = 'b'")
    with pytest.raises(ValueError, match="ledger.toml"):
        ledger_file(tmp_path, "[[xfail]]\ncase = 'a'")


def test_a_stale_entry_fails_a_whole_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = Case("a[b,f64]", "ops", "a", Needs("f64"), lambda context: None)
    monkeypatch.setattr(laws, "LAWS", {"ops": lambda: iter([case])})
    gone = ledger_file(tmp_path, "[[xfail]]\ncase = 'gone[*]'\nreason = 'long ago'")
    report = run_suite(Vendor, ledger=gone)
    assert report.stale == ("gone[*]",) and not report.ok and "`gone[*]`" in report.as_markdown()
    assert run_suite(Vendor, ledger=Ledger()).stale == ()


class Refusing(Vendor):
    """Says no to everything, or computes in a dtype that nobody knows."""

    def supports(self, op: str, **case: Any) -> str | None:
        return "no"


class Misspelt(Vendor):
    def probe(self, rank: int = 0, world: int = 1) -> Any:
        return replace(super().probe(), compute_dtypes=("float32",))


class OneCache(Vendor):
    """Keeps K and V in f32 only, and refuses other states."""

    def probe(self, rank: int = 0, world: int = 1) -> Any:
        return replace(super().probe(), kv_dtypes=("f32",))

    def alloc(self, spec: Any, pages: int) -> Any:
        assert spec.dtype == "f32"
        return super().alloc(spec, pages)


def test_of_chosen_cases_some_must_be_run() -> None:
    for platform, only in ((Refusing, "attention[*f32]"), (Misspelt, "linear")):
        report = run_suite(platform, only=[only], ledger=Ledger())
        assert set(report.counts()) == {Outcome.UNSUPPORTED} and not report.ok
        assert report.unproved() == ["none of these cases was run: nothing is shown"]
    assert run_suite("reference", only=["rope"]).ok, "nothing else is asked of a part"


def test_other_dtypes_of_k_and_v_keep_no_op_from_its_cases() -> None:
    report = run_suite(OneCache, only=["linear[f32,T1*", "sample[state*", "attention[mha*"], ledger=Ledger())
    passed = {result.case.id for result in report.results if result.outcome is Outcome.PASSED}
    assert report.ok and {"linear[f32,T1,bias,f64]", "sample[state,f64]", "attention[mha,4/4x16,page16,f32]"} <= passed


def test_a_platform_without_a_manifest_file_is_told() -> None:
    [(kind, reason)] = outcome(Vendor, "manifest[file]")
    assert kind == "wrong" and "there is no " in reason and "tests/manifest.toml" in reason


def test_a_wrong_value_of_attention_says_whose_it_is() -> None:
    [(kind, reason)] = outcome(Mistaken, "attention[copied_pages,4*f32]")
    assert kind == "wrong"
    assert re.search(r"at \[0, 0, 0\] \(token 0 = row 0, sequence slot 1, position 33 of context 34, page \d+, "
                     r"kv head 0, head 0; 6 of 6 tokens are off\), expected", reason), reason


def test_what_computes_nothing_is_refused() -> None:
    with pytest.raises(Refused, match="null cannot be held to the laws: no mathematics"):
        run_suite("null")


def test_two_ranks_need_a_platform_that_runs_them() -> None:
    reasons = {reason for _, reason in outcome("reference", "parallel[llama*f64]")}
    assert reasons == {"the reference runs in a single process; 2 ranks were asked for"}
    given = {reason for _, reason in outcome(Reference({}), "parallel[llama*f64]")}
    assert given == {"a second platform cannot be made: the suite was given an object"}


class Two(Vendor):
    """Says that it runs two ranks, and sums nothing."""

    def probe(self, rank: int = 0, world: int = 1) -> Any:
        return replace(super().probe(), local_ranks=world)


def test_half_a_model_is_not_the_model() -> None:
    kinds = {kind for kind, _ in outcome(Two, "parallel[llama*f64]")}
    assert kinds <= {"wrong", "error"}
