"""FlashInfer's attention on the cuda platform: the laws, with graphs recorded, through a stand-in that takes no call
which the real library's signatures (ci/flashinfer_signatures.json) would not."""
from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import flashinfer_signatures
import numpy as np
import pytest
import torch
from isthmus.conformance import Case, Context, Outcome, all_cases, run_case
from isthmus.conformance.driver import Driver
from isthmus.conformance.ledger import Ledger
from isthmus.conformance.oracle import placed, text
from isthmus.core.platform import AttentionSpec, Unavailable
from isthmus.platforms.accelerator.attention import View
from isthmus.platforms.accelerator.cache import LayerCache
from isthmus.platforms.accelerator.device import Device
from isthmus.platforms.cuda import flashinfer_attention, flashinfer_library
from isthmus.platforms.cuda.flashinfer_attention import FlashInfer, FlashInferFirst
from isthmus.platforms.cuda.flashinfer_library import Case as Shape
from isthmus.platforms.cuda.flashinfer_library import Limits
from isthmus.platforms.cuda.kernels import make_kernels

from .emulation.cuda_flashinfer import library as stand_in
from .emulation.cuda_flashinfer.platform import Platform
from .emulation.recorder import RecordedGraph

COST = 60  # seconds
TABLE = flashinfer_signatures.read_table()
CASES = [case for case in all_cases() if case.dtype != "f64" and (
    case.law in ("model", "state", "compile") or case.op == "attention")]
PARAMETERS = [pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (case.law == "ops")) for case in CASES]


@cache
def library() -> SimpleNamespace:
    signatures = {name: flashinfer_signatures.signature(each) for name, each in TABLE["signatures"].items()}
    return stand_in.library({name: each.bind for name, each in signatures.items()}, TABLE["version"])


@cache
def context() -> Context:
    def make() -> Platform:
        platform = Platform({"graphs": "first"})
        platform.library = library()
        return platform
    platform = make()
    return Context(platform, platform.probe(), make=make)


@pytest.mark.parametrize("case", PARAMETERS)
def test_law(case: Case) -> None:
    result = run_case(context(), case, Ledger())
    if result.outcome is Outcome.UNSUPPORTED:
        pytest.skip(result.reason)
    assert result.outcome is Outcome.PASSED, f"{result.outcome}: {result.reason}"
    refused = {case: why for case, why in context().platform.first.reasons.items() if "queries in" not in why}
    assert not refused, "the stand-in was not taken"


def test_decode_and_prefill_are_flashinfers_and_a_decode_step_is_one_graph() -> None:
    model = placed(context(), "gemma3", "f32")  # windows of some layers
    driver, tokens = Driver(model), text(30, 0, "flashinfer")
    before, replayed = stand_in.CALLS.copy(), RecordedGraph.replayed
    driver.logits((1, tokens[:9]), (2, tokens[:7]))
    for at in range(9, 14):
        driver.logits((1, [tokens[at]]), (2, [tokens[at - 2]]))
    made = stand_in.CALLS - before
    assert made["BatchPrefillWithPagedKVCacheWrapper.run"] >= 3 and RecordedGraph.replayed - replayed >= 3
    # A replay runs nothing anew, and plans once for each case: with a window, and without.
    before = stand_in.CALLS.copy()
    driver.logits((1, [3]), (2, [4]))
    assert stand_in.CALLS - before == {"BatchDecodeWithPagedKVCacheWrapper.plan": 2}
    assert "FlashInfer" in context().manifest.details["attention"]


def decoded(tokens: list[int]) -> np.ndarray:
    """Logits of a decode step by step, over three pages: the first two launches, then replays."""
    driver = Driver(placed(context(), "llama", "f32"))
    driver.logits((1, tokens[:5]))
    return np.concatenate([driver.logits((1, [token]))[0] for token in tokens[5:]])


def test_a_replay_without_a_plan_of_its_own_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, prepare = text(20, 0, "stale"), FlashInfer.prepare
    right = decoded(tokens)
    np.testing.assert_array_equal(decoded(tokens), right)

    def once(self: FlashInfer, view: View) -> None:
        if view not in self.graphs:
            prepare(self, view)
    monkeypatch.setattr(FlashInfer, "prepare", once)
    assert not np.allclose(decoded(tokens), right)


def shape(heads: int = 8, kv_heads: int = 2, dim: int = 128, page_size: int = 16, dtype: torch.dtype = torch.bfloat16,
          kv_dtype: torch.dtype | None = None, **spec: float) -> Shape:
    return Shape(heads, kv_heads, dim, page_size, dtype, kv_dtype or dtype, AttentionSpec(0.1, **spec))


@pytest.mark.parametrize(("case", "why"), [
    (shape(), None), (shape(kv_dtype=torch.float8_e4m3fn), None), (shape(window=7, softcap=30.0), None),
    (shape(dtype=torch.float16), None), (shape(dtype=torch.float32), "queries in torch.float32"),
    (shape(kv_dtype=torch.float16), "over torch.float16"), (shape(dim=80), "heads of 80")])
def test_which_cases_are_taken_is_told(case: Shape, why: str | None) -> None:
    reason = Limits().reason_against(case)
    assert reason is None if why is None else why in reason


def test_groups_that_only_matrix_units_have_go_there() -> None:
    assert [shape(heads=2 * group).tensor_cores for group in (1, 2, 3, 4, 5, 7)] == [False] * 3 + [True] * 3
    assert shape(heads=2, kv_dtype=torch.float8_e5m2).tensor_cores


def test_a_window_counts_the_query_itself() -> None:
    assert shape(window=1).arguments()["window_left"] == 0 and shape().arguments()["window_left"] == -1


@pytest.mark.parametrize(("mode", "found", "why"), [
    ("off", (), "turned off"), ("auto", (), "not installed"), ("auto", ("flashinfer",), "flashinfer-jit-cache"),
    ("build", ("flashinfer",), "cannot be imported"), ("auto", ("flashinfer", "flashinfer_jit_cache"), "cannot be")])
def test_why_it_does_not_serve(mode: str, found: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError("libcudart.so.13")
    monkeypatch.setattr(flashinfer_library, "find_spec", lambda name: name if name in found else None)
    monkeypatch.setattr(flashinfer_library, "import_module", missing)
    assert why in flashinfer_library.chosen(mode)


def test_it_comes_first_in_what_the_platform_computes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_library, "find_spec", lambda name: name)
    monkeypatch.setattr(flashinfer_library, "import_module", lambda name: library())
    device = Device(torch.device("cpu"))
    kernels = make_kernels(device, narrow=False)
    below = kernels.backends[0].name
    assert kernels.describe()["attention"] == f"FlashInfer {TABLE['version']}, else {below}"
    q, kv, spec = torch.zeros(1, 4, 64).bfloat16(), torch.zeros(2, 2, 16, 2, 64).bfloat16(), AttentionSpec(0.1)
    cache = LayerCache(kv)
    assert isinstance(kernels.backend(q, cache, spec), FlashInfer)
    assert kernels.backend(q.float(), LayerCache(kv.float()), spec).name == below
    off = make_kernels(device, narrow=False, flashinfer="off")
    assert off.describe()["FlashInfer"] == "turned off by an option" and off.backend(q, cache, spec).name == below


def test_another_word_for_the_option_is_refused() -> None:
    with pytest.raises(Unavailable, match="flashinfer='always': one of auto, build, off"):
        flashinfer_library.chosen("always")


def test_nothing_is_compiled_within_a_trial_of_what_comes_built(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    class Spy(FlashInfer):
        def attend(self, *step: object) -> torch.Tensor:
            seen.append(os.environ.get(flashinfer_library.NO_COMPILER))
            return super().attend(*step)
    monkeypatch.setattr(flashinfer_attention, "FlashInfer", Spy)
    monkeypatch.setattr(flashinfer_library, "find_spec", lambda name: name)
    monkeypatch.setattr(flashinfer_library, "import_module", lambda name: library())
    for mode, value in (("auto", "1"), ("build", None)):
        monkeypatch.delenv(flashinfer_library.NO_COMPILER, raising=False)
        first = make_kernels(Device(torch.device("cpu")), False, mode).makers[0]
        assert ask(first, shape()) is not None and set(seen) == {value}
        assert flashinfer_library.NO_COMPILER not in os.environ
        seen.clear()
    monkeypatch.setenv(flashinfer_library.NO_COMPILER, "0")
    with flashinfer_library.nothing_compiled():
        assert os.environ[flashinfer_library.NO_COMPILER] == "1"
    assert os.environ[flashinfer_library.NO_COMPILER] == "0"


def test_wrong_attention_is_left_to_others_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its window counted one token more."""
    case, arguments = shape(window=9), Shape.arguments
    assert ask(FlashInferFirst(library(), Device(torch.device("cpu"))), case) is not None
    monkeypatch.setattr(Shape, "arguments", lambda self: arguments(self) | {"window_left": 9})
    first = FlashInferFirst(library(), Device(torch.device("cpu")))
    assert ask(first, case) is None and "decode: row" in first.reasons[case]


def ask(first: FlashInferFirst, case: Shape) -> FlashInfer | None:
    cache = torch.zeros((2, 2, case.page_size, case.kv_heads, case.head_dim), dtype=case.kv_dtype)
    return first(torch.zeros((1, case.heads, case.head_dim), dtype=case.dtype), LayerCache(cache), case.spec)


def test_what_cannot_be_built_is_left_to_others_with_the_reason() -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Could not find nvcc")
    broken = SimpleNamespace(__version__="1", BatchDecodeWithPagedKVCacheWrapper=fail)
    first = FlashInferFirst(broken, Device(torch.device("cpu")))
    assert ask(first, shape()) is None and first.reasons[shape()] == "RuntimeError: Could not find nvcc"
    assert isinstance(ask(FlashInferFirst(library(), Device(torch.device("cpu"))), shape()), FlashInfer)


@pytest.mark.parametrize(("wrapper", "method", "name"), [
    ("BatchDecodeWithPagedKVCacheWrapper", "_plan_impl", "sm_scale"),
    ("BatchDecodeWithPagedKVCacheWrapper", "__init__", "use_tensor_cores"),
    ("BatchPrefillWithPagedKVCacheWrapper", "plan", "paged_kv_last_page_len"),
    ("BatchPrefillWithPagedKVCacheWrapper", "run", "paged_kv_cache")])
def test_a_call_that_the_real_library_would_not_take_is_refused(wrapper: str, method: str, name: str) -> None:
    """As if the library had called one parameter something else, or had taken one away."""
    def without(each: inspect.Signature) -> Callable[..., object]:
        return each.replace(parameters=[p for p in each.parameters.values() if p.name != name]).bind
    signatures = {each: flashinfer_signatures.signature(found) for each, found in TABLE["signatures"].items()}
    binds = {each: without(found) if each == f"{wrapper}.{method}" else found.bind
             for each, found in signatures.items()}
    first = FlashInferFirst(stand_in.library(binds, "other"), Device(torch.device("cpu")))
    assert ask(first, shape()) is None
    assert first.reasons[shape()].startswith("TypeError")
