"""AITER on the rocm platform, where Triton is not needed: how it is found, and its attention behind its trial. Its
products and experts are tests/triton/test_libraries.py."""
from __future__ import annotations

import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import aiter_signatures
import flashinfer_signatures
import numpy as np
import pytest
import torch
from isthmus.conformance import Case, Context, Outcome, all_cases, run_case
from isthmus.conformance.ledger import Ledger
from isthmus.core.platform import AttentionSpec, Unavailable
from isthmus.platforms.accelerator.cache import LayerCache
from isthmus.platforms.accelerator.device import Device
from isthmus.platforms.accelerator.kernels import Kernels
from isthmus.platforms.rocm import aiter_attention, aiter_library
from isthmus.platforms.rocm.aiter_attention import Aiter, AiterFirst, ByStep
from isthmus.platforms.rocm.aiter_library import Library
from isthmus.platforms.rocm.runtime import RocmPlatform

from .emulation.aiter_attention import unified_attention
from .emulation.device import Emulated

COST = 16  # seconds
TABLE = aiter_signatures.read_table()
CASES = [case for case in all_cases() if case.dtype != "f64" and case.law in ("model", "state", "compile")]
PARAMETERS = [pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (number % 12 != 0))
              for number, case in enumerate(CASES)]


def library(leaks: bool, without: str = "") -> Library:
    parameters = [each for each in TABLE["signatures"]["unified_attention"] if each[0] != without]
    return Library(TABLE["version"], {"unified_attention": unified_attention(
        flashinfer_signatures.signature(parameters).bind, leaks)})


class Platform(Emulated, RocmPlatform):
    """AITER's attention before the paths of torch's operators. leaks: as 0.1.7 does, which leaves it the prompts."""

    __doc__ = RocmPlatform.__doc__
    interface_version = 1
    arch_name = "gfx942"
    leaks = True

    def kernels(self, device: Device) -> Kernels:
        kernels = Kernels(device)
        self.first = AiterFirst(library(self.leaks), device, kernels.plain_backend)
        kernels.makers = (self.first,)
        return kernels


@cache
def context(leaks: bool) -> Context:
    def make() -> Platform:
        platform = Platform({"graphs": "first"})
        platform.leaks = leaks
        return platform
    platform = make()
    return Context(platform, platform.probe(), make=make)


@pytest.mark.parametrize("leaks", [False, True])
@pytest.mark.parametrize("case", PARAMETERS)
def test_law(case: Case, leaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiter_attention, "HALVES", (torch.bfloat16, torch.float16, torch.float32))  # the laws' models
    result = run_case(context(leaks), case, Ledger())
    if result.outcome is Outcome.UNSUPPORTED:
        pytest.skip(result.reason)
    assert result.outcome is Outcome.PASSED, f"{result.outcome}: {result.reason}"
    others = {key: why for key, why in context(leaks).platform.first.reasons.items() if "queries in" not in why}
    assert all(key[-1] for key in others) and (leaks or not others), others


def choose(found: Library, dtype: torch.dtype = torch.bfloat16, page: int = 16) -> tuple[AiterFirst, Any]:
    kernels = Kernels(Device(torch.device("cpu")))
    first = AiterFirst(found, kernels.device, kernels.plain_backend)
    return first, first(torch.zeros(1, 4, 32, dtype=dtype), LayerCache(torch.zeros(2, 2, page, 2, 32, dtype=dtype)),
                        AttentionSpec(0.2))


def test_each_kind_of_step_is_chosen_by_itself() -> None:
    assert isinstance(choose(library(leaks=False))[1], Aiter)
    first, backend = choose(library(leaks=True))
    assert isinstance(backend, ByStep) and isinstance(backend.others, Aiter)
    assert backend.name == f"composed of torch operators in decode steps, else AITER {TABLE['version']}"
    ((key, why),) = first.reasons.items()
    assert key[-1] is True and "NMSE of nan" in why
    first, backend = choose(library(leaks=False), torch.float32)
    assert backend is None and set(first.reasons.values()) == {"queries in torch.float32 over torch.float32"}


@pytest.mark.parametrize("name", ["seqused_k", "block_table", "window_size", "softcap", "out"])
def test_another_version_that_does_not_take_the_call_is_left(name: str) -> None:
    first, backend = choose(library(False, without=name))
    assert backend is None and all(why.startswith("TypeError") for why in first.reasons.values())


def test_the_real_one_is_taken_for_prompts_alone() -> None:
    """What its trial said in Triton's interpreter; with zeros beyond the contexts all cases held."""
    import json
    table = json.loads(Path(aiter_signatures.TABLE.with_name("aiter_attention.json")).read_text("utf-8"))
    assert table["amd-aiter"] == TABLE["version"]
    for case in table["cases"]:
        left = case["beyond"] == "nan" and (case["steps"] == "decode" or case["page"] > 32)
        assert (case["reason"] is not None) == left, case


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `aiter` with its operators, in which nothing comes built."""
    package = types.ModuleType("aiter")
    package.__path__ = [str(tmp_path)]
    package.__spec__ = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    for name in ("gemm_a8w8", "gemm_a8w8_blockscale", "ActivationType", "QuantType"):
        setattr(package, name, name)
    fused = types.ModuleType("aiter.fused_moe")
    fused.fused_moe = "fused_moe"
    monkeypatch.setitem(sys.modules, "aiter", package)
    monkeypatch.setitem(sys.modules, "aiter.fused_moe", fused)
    monkeypatch.setattr(aiter_library, "find_spec", lambda name: package.__spec__)
    monkeypatch.setattr(aiter_library.metadata, "version", lambda name: "0.1.7")
    (tmp_path / "jit").mkdir()
    return tmp_path / "jit"


def test_what_does_not_come_built_is_told(installed: Path) -> None:
    found = aiter_library.chosen("auto")
    assert not found.has("gemm_a8w8") and "PREBUILD_KERNELS=1, or say aiter=build" in found.missing["gemm_a8w8"]
    assert "No module named" in found.missing["unified_attention"]
    (installed / "module_gemm_a8w8.cpython-311-x86_64-linux-gnu.so").touch()
    found = aiter_library.chosen("auto")
    assert found.has("gemm_a8w8", "QuantType") and not found.has("gemm_a8w8_blockscale") and not found.has("fused_moe")
    assert aiter_library.chosen("build").has("gemm_a8w8", "gemm_a8w8_blockscale", "fused_moe")
    (installed / "aiter_.so").touch()
    assert aiter_library.chosen("auto").has("gemm_a8w8_blockscale", "fused_moe")
    with pytest.raises(AttributeError):
        found.gemm_a4w4  # noqa: B018


def test_why_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="aiter='on': one of auto, build, off"):
        aiter_library.chosen("on")
    assert aiter_library.chosen("off") == "turned off by an option"
    assert aiter_library.chosen("auto") == "not installed"
    monkeypatch.setattr(aiter_library, "find_spec", lambda name: object())

    def fails(name: str) -> None:
        raise RuntimeError("Unable to find rocminfo")
    monkeypatch.setattr(aiter_library, "import_module", fails)
    assert aiter_library.chosen("auto") == "cannot be imported: RuntimeError: Unable to find rocminfo"


def test_rows_of_nobody_are_zeros_in_a_replayed_step() -> None:
    """A graph's step has more rows than requests; their contexts are empty."""
    _, backend = choose(library(leaks=False))
    cache = LayerCache(torch.randn(4, 2, 16, 2, 32).bfloat16())
    from isthmus.platforms.accelerator.attention_trial import view_of
    view = view_of([(1, 7), (0, 0), (0, 0)], 16, True, Device(torch.device("cpu")))
    out = backend.attend(torch.randn(3, 4, 32).bfloat16(), cache, view, AttentionSpec(0.2))
    assert np.isfinite(out.float().numpy()).all() and not out[1:].any() and out[0].any()
