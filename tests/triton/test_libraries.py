"""FlashInfer's and AITER's products and experts behind their trials, by stand-ins that take no call which the real
signatures would not: what serves, what is left to Triton and why, and that results are Triton's either way."""
from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from .interpreter import prepare

if prepare().type != "cpu":
    pytest.skip("stand-ins of the device's own libraries", allow_module_level=True)

import aiter_signatures
import flashinfer_signatures
from isthmus.conformance.driver import Driver, Model
from isthmus.core.platform import MoESpec, RawTensor, WeightSpec
from isthmus.platforms.accelerator.device import Device
from isthmus.platforms.accelerator.trial import Trial, Trials
from isthmus.platforms.cuda.kernels import with_flashinfer
from isthmus.platforms.rocm.aiter_library import Library
from isthmus.platforms.rocm.kernels import with_aiter
from isthmus.platforms.triton_kit.kernels import TritonKernels
from isthmus.platforms.triton_kit.library import Fused, LibraryKernels, Shared, Whole
from isthmus.platforms.triton_kit.weights import Policy

from ..emulation import aiter
from ..emulation.cuda.platform import Platform as Cuda
from ..emulation.cuda_flashinfer import library as flashinfer
from ..emulation.cuda_flashinfer import products
from ..emulation.recorder import RecordedGraph
from ..emulation.rocm.platform import Platform as Rocm
from ..scheme_files import bf16, tiny_weights, write_config, write_safetensors

COST = 30  # seconds
SIZES = (1, 8)
RANDOM = np.random.default_rng(5)


def signatures(table: dict[str, Any], change: Callable[[str, Any], Any] = lambda name, each: each) -> dict[str, Any]:
    found = {name: flashinfer_signatures.signature(each) for name, each in table["signatures"].items()}
    return {name: change(name, each).bind for name, each in found.items()}


FLASHINFER, AITER = signatures(flashinfer_signatures.read_table()), signatures(aiter_signatures.read_table())


def cuda(arch: str = "sm_90", build: bool = True, bind: Any = None, **faults: Any) -> LibraryKernels:
    names = {name.rpartition(".")[2]: name for name in products.NAMES}
    library = flashinfer.library(bind or FLASHINFER, "1", {names[name]: fault for name, fault in faults.items()})
    device = Device(torch.device("cpu"), arch=arch, processors=4)
    return with_flashinfer(library, device, Policy("fn", None), build, Trials(device, SIZES, lambda: RecordedGraph))


def rocm(arch: str = "gfx942", library: Library | None = None, **faults: Any) -> LibraryKernels:
    device = Device(torch.device("cpu"), arch=arch, processors=4)
    return with_aiter(library or aiter.library(AITER, "1", faults), device,
                      Policy("fnuz" if arch == "gfx942" else "fn", None), Trials(device, SIZES, lambda: RecordedGraph))


def codes(*shape: int) -> np.ndarray:
    values = torch.from_numpy(RANDOM.normal(0, 30, shape)).float()
    return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(-1)


def f32(*shape: int, value: float | None = None) -> RawTensor:
    numbers = RANDOM.uniform(1e-3, 2e-3, shape) if value is None else np.full(shape, value)
    return RawTensor("f32", shape, numbers.astype("<f4").view(np.uint8).reshape(-1))


def blocks(rows: int = 128, width: int = 256) -> RawTensor:
    return RawTensor("fp8_128", (rows, width), codes(rows, width), (f32(-(-rows // 128), -(-width // 128)),))


def tensor(scale: float = 1e-3) -> RawTensor:
    return RawTensor("fp8", (64, 96), codes(64, 96), (f32(1, 1, value=scale),))


def int8() -> RawTensor:
    return RawTensor("int8", (64, 96), RANDOM.integers(-127, 128, (64, 96), np.int8).view(np.uint8).reshape(-1),
                     (f32(64, 1),))


def nvfp4(factor: float = 0.25) -> RawTensor:
    packed = RANDOM.integers(0, 256, 64 * 32, np.uint8)
    scales = torch.from_numpy(RANDOM.uniform(0.5, 4, 64 * 4)).float().to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return RawTensor("nvfp4", (64, 64), packed, (RawTensor("f8_e4m3", (64, 4), scales), f32(1, value=factor)))


def spec(*raws: RawTensor, role: str = "linear", experts: int = 0, cut: Any = 0,
         scale: float | None = None) -> WeightSpec:
    return WeightSpec(tuple(map(str, range(len(raws)))), role, cut, experts, narrow=True, input_scale=scale)


def plain(kernels: LibraryKernels) -> TritonKernels:
    return TritonKernels(kernels.device, kernels.policy)


LINEARS = {
    "blocks": (cuda, [blocks], None, Shared), "blocks stacked": (cuda, [blocks, blocks], None, Shared),
    "calibrated": (cuda, [tensor], 0.05, Shared), "calibrated alike": (cuda, [tensor, tensor], 0.05, Shared),
    "nvfp4": (lambda: cuda("sm_100"), [nvfp4], None, Whole),
    "nvfp4 stacked": (lambda: cuda("sm_103"), [nvfp4] * 2, None, Whole), "aiter blocks": (rocm, [blocks], None, Shared),
    "aiter blocks ocp": (lambda: rocm("gfx950"), [blocks], None, Shared),
    "aiter fp8": (rocm, [tensor, lambda: tensor(3e-3)], None, Shared), "aiter int8": (rocm, [int8], None, Shared),
    "aiter calibrated": (lambda: rocm("gfx950"), [tensor], 0.05, Shared)}


@pytest.mark.parametrize("name", LINEARS)
def test_a_product_serves_after_its_trial_with_the_numbers_of_triton(name: str) -> None:
    make, parts, scale, kind = LINEARS[name]
    kernels, raws = make(), [part() for part in parts]
    leaf = kernels.load(raws, spec(*raws, scale=scale), "bf16")
    ours = plain(kernels).load(raws, spec(*raws, scale=scale), "bf16")
    assert isinstance(leaf, kind), kernels.trials.verdicts
    assert kernels.offers[0].name in str(leaf) and str(leaf).startswith(str(ours)) and not str(leaf).endswith("16")
    before, bias = products.CALLS + aiter.CALLS, torch.randn(sum(raw.shape[0] for raw in raws)).bfloat16()
    for tokens in (1, 8, 5):
        x = torch.randn(tokens, raws[0].shape[1]).bfloat16()
        got, want = leaf.product(x, bias).double(), ours.product(x, bias).double()
        assert (got - want).square().mean() < 2e-5 * want.square().mean()
    called = (products.CALLS + aiter.CALLS - before).total()
    again = deepcopy(leaf)  # as device_check has more layers than it was given
    assert again.offer is leaf.offer and torch.equal(again.product(x, bias), leaf.product(x, bias))
    assert called == (2 if kind is Shared else 3)  # five tokens were not tried
    assert len(kernels.trials.verdicts) == 1
    kernels.load(raws, spec(*raws, scale=scale), "bf16")
    assert len(kernels.trials.verdicts) == 1  # once for each kind and shape


LEFT = {
    "another architecture": (lambda: cuda("sm_120"), [blocks]),
    "compiles at first use": (lambda: cuda(build=False), [blocks]),
    "two scales": (cuda, [tensor, lambda: tensor(3e-3)]), "ragged blocks": (cuda, [lambda: blocks(96, 96)]),
    "two factors": (lambda: cuda("sm_100"), [nvfp4, lambda: nvfp4(0.5)]), "hopper": (cuda, [nvfp4]),
    "aiter ragged": (rocm, [lambda: blocks(96, 96)])}


@pytest.mark.parametrize("name", LEFT)
def test_what_it_does_not_have_is_not_tried(name: str) -> None:
    make, parts = LEFT[name]
    kernels, raws = make(), [part() for part in parts]
    leaf = kernels.load(raws, spec(*raws, scale=0.05), "bf16")
    assert not isinstance(leaf, (Shared, Whole)) and not kernels.trials.verdicts


def no_zeros(out: torch.Tensor) -> None:
    """Of the row of zeros that trials of more than a few tokens have."""
    if len(out) > 1:
        out[0].add_(1e-20)


@pytest.mark.parametrize("fault, why", [
    (lambda out: out.mul_(1.02), "NMSE of 0.0004"), (lambda out: out[1:-1].fill_(torch.nan), "NMSE of nan"),
    (no_zeros, "row 0 of 8")])
def test_wrong_numbers_are_told_and_left_to_triton(fault: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    for kernels, raw in ((cuda(fp8_blockscale_gemm_sm90=fault), blocks()), (rocm(gemm_a8w8=fault), int8())):
        with caplog.at_level(logging.INFO):
            assert not isinstance(kernels.load([raw], spec(raw), "bf16"), Shared)
        (found,) = kernels.trials.verdicts.values()
        assert why in found.reason and why in caplog.text and not found.right


def test_a_number_of_tokens_that_is_refused_is_left_alone() -> None:
    def refuse(out: torch.Tensor) -> None:
        if len(out) == 1:
            raise ValueError("m must be at least 8")
    kernels, raw = cuda(fp8_blockscale_gemm_sm90=refuse), blocks()
    assert kernels.load([raw], spec(raw), "bf16").sizes == {8}
    (found,) = kernels.trials.verdicts.values()
    assert found.reason == "ValueError: m must be at least 8 (at 1 tokens)" and not found.everywhere


def test_another_version_is_not_called_or_left() -> None:
    def renamed(name: str, each: Any) -> Any:
        return each.replace(parameters=[p for p in each.parameters.values() if p.name not in ("weight_scale", "alpha")])
    changed = signatures(flashinfer_signatures.read_table(), renamed)
    for arch, raw in (("sm_90", blocks()), ("sm_100", nvfp4())):
        kernels = cuda(arch, bind=changed)
        assert not isinstance(kernels.load([raw], spec(raw), "bf16"), (Shared, Whole))
        assert all("TypeError" in found.reason for found in kernels.trials.verdicts.values())
    older = flashinfer.library(FLASHINFER, "0")
    del older.gemm.mm_bf16_fp4
    device = Device(torch.device("cpu"), arch="sm_90")
    made = with_flashinfer(older, device, Policy("fn", None), True, Trials(device, SIZES, lambda: RecordedGraph))
    assert not made.packed and len(made.offers) == 2 and "mm_bf16_fp4" in made.describe()["products and experts"]


def experts(kind: str, count: int, width: int, inner: int) -> tuple[list[RawTensor], list[RawTensor]]:
    def one(rows: int, columns: int) -> RawTensor:
        if kind == "fp8_128":
            return blocks(rows, columns)
        if kind == "fp8":
            return RawTensor("fp8", (rows, columns), codes(rows, columns), (f32(rows, 1),))
        values = RANDOM.normal(0, 0.05, (rows, columns)).astype(np.float32)
        top = (values.view(np.uint32) >> 16).astype("<u2")
        return RawTensor("bf16", (rows, columns), top.view(np.uint8).reshape(-1))
    return ([one(inner, width) for _ in range(2 * count)], [one(width, inner) for _ in range(count)])


EXPERTS = {"dense": (cuda, "bf16", 64, 32), "blocks": (cuda, "fp8_128", 128, 128),
           "aiter dense": (rocm, "bf16", 64, 32), "aiter fp8": (rocm, "fp8", 64, 32),
           "aiter blocks": (lambda: rocm("gfx950"), "fp8_128", 128, 128)}


def loaded(kernels: TritonKernels, pair: Any, cut: tuple[Any, Any] = (0, 1)) -> list[Any]:
    return [kernels.load(raws, spec(*raws, role="experts", experts=4, cut=each), "bf16")
            for raws, each in zip(pair, cut, strict=True)]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("aiter fp8", "aiter blocks")))
                                  for name in EXPERTS])
def test_experts_serve_after_their_trial_and_go_back_for_another_activation(name: str) -> None:
    make, kind, width, inner = EXPERTS[name]
    kernels, pair = make(), experts(kind, 4, width, inner)
    weights, ours = loaded(kernels, pair), loaded(plain(kernels), pair)
    assert all(isinstance(each.weight, Fused) for each in weights), kernels.trials.verdicts
    assert len(kernels.trials.verdicts) == 1 and kernels.experts[0].name in str(weights[0])
    x, logits, live = torch.randn(7, width).bfloat16(), torch.randn(7, 4), torch.arange(7) < 5
    x[5:] = torch.nan
    for act, fused in (("silu", True), ("gelu", False), ("silu", False)):
        settings, before = MoESpec(4, 2, act=act), products.CALLS + aiter.CALLS
        got = kernels.moe(x, logits, *deepcopy(weights) if fused else weights, settings, None, live)[:5].double()
        want = plain(kernels).moe(x, logits, *ours, settings, None, live)[:5].double()
        assert (got - want).square().mean() < (5e-5 if "bf16" in kind else 2e-3) * want.square().mean(), act
        assert ((products.CALLS + aiter.CALLS - before).total() > 0) == fused  # once put back, they stay


def test_what_finds_no_memory_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")
    kernels, pair, raw = cuda("sm_100"), experts("bf16", 4, 64, 32), nvfp4()
    monkeypatch.setattr(kernels.packed[0], "pack", full)
    assert not isinstance(kernels.load([raw], spec(raw), "bf16"), Whole)
    loaded(kernels, pair)
    monkeypatch.setattr(kernels.experts[0], "pack", full)
    assert not any(isinstance(each.weight, Fused) for each in loaded(kernels, pair))
    assert "no memory to put these weights in order" in caplog.text
    kernels.trials.verdicts.clear()
    assert not any(isinstance(each.weight, Fused) for each in loaded(kernels, pair))
    assert all("OutOfMemoryError" in found.reason for found in kernels.trials.verdicts.values())


def test_experts_that_are_elsewhere_or_wrong_are_triton_s() -> None:
    pair = experts("bf16", 4, 64, 32)
    assert not any(isinstance(each.weight, Fused) for each in loaded(cuda(), pair, ("expert", "expert")))
    for kernels in (cuda(cutlass_fused_moe=lambda out: out[0].add_(1)), rocm(fused_moe=lambda out: out[0].add_(1))):
        assert not any(isinstance(each.weight, Fused) for each in loaded(kernels, pair))
        (found,) = kernels.trials.verdicts.values()
        assert not found.everywhere and "row 0" in found.reason


def test_what_takes_longer_is_left(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "ratio", lambda trial, tokens: 1.5 if tokens == 8 else 0.25)
    kernels = cuda()
    kernels.trials = Trials(kernels.device, (1, 8, 24), lambda: RecordedGraph)
    raw = blocks()
    with caplog.at_level(logging.INFO):
        leaf = kernels.load([raw], spec(raw), "bf16")
    assert leaf.sizes == {1, 24} and "no slower at 2" in caplog.text and "0.67 of our time" in caplog.text


@pytest.mark.parametrize("kind, make", [(Cuda, cuda), pytest.param(Rocm, rocm, marks=pytest.mark.slow)])
def test_a_sparse_model_has_the_logits_of_triton(tmp_path: Any, kind: type, make: Any) -> None:
    """Prompts and decode steps in buckets, padding among them, replayed from graphs."""
    write_config(tmp_path, "qwen3_moe")
    write_safetensors(tmp_path / "model.safetensors", {name: bf16(value)[0] for name, value in tiny_weights(
        "qwen3_moe").items()}, {"format": "pt"})

    class WithLibrary(kind):
        def kernels(self, device: Device) -> Any:
            return make()
    found = []
    for chosen in (kind, WithLibrary):
        platform = chosen({})
        manifest = platform.probe()
        driver = Driver(Model(platform, manifest, tmp_path, "bf16", manifest.page_sizes[0]))
        found.append(np.concatenate([driver.logits((1, tokens))[0] for tokens in ([5, 9, 3, 120, 7], [7], [44], [3])]))
        weights = driver.model.loaded.weights["layers"]
        assert all(isinstance(layer[name].weight, Fused) == (chosen is WithLibrary)
                   for layer in weights for name in ("w13", "w2"))
    assert np.mean((found[0] - found[1]) ** 2) < 1e-3 * np.mean(found[0] ** 2)
