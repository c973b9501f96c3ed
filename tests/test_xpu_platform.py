"""The xpu platform without an Intel GPU: why it is not there, what it gives to vllm-xpu-kernels' operators, and the
laws on the CPU, where the operators are registered under the wheel's schemas (tests/emulation/xpu_operators)."""
from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from isthmus.conformance import Case, Context, Outcome, all_cases, run_case
from isthmus.conformance.driver import Driver
from isthmus.conformance.formats import quantized
from isthmus.conformance.ledger import Ledger
from isthmus.conformance.oracle import placed, text
from isthmus.core.manifests import read_file
from isthmus.core.platform import AttentionSpec, RawTensor, Unavailable, WeightSpec
from isthmus.platforms.accelerator import build
from isthmus.platforms.accelerator.base import MODES
from isthmus.platforms.accelerator.cache import LayerCache
from isthmus.platforms.accelerator.kernels import Kernels
from isthmus.platforms.accelerator.moe import act_mul
from isthmus.platforms.accelerator.quant import Dense, Vector
from isthmus.platforms.expand import expand
from isthmus.platforms.xpu import driver, graph, operators, quant, runtime
from isthmus.platforms.xpu.attention import PagedAttention
from isthmus.platforms.xpu.kernels import XpuKernels, joined, make_kernels

from .emulation.device import HostDevice
from .emulation.recorder import RecordedGraph
from .emulation.xpu_operators.platform import Platform
from .emulation.xpu_operators.reference import KERNELS, register

ROOT = Path(__file__).resolve().parent.parent
COST = 90  # seconds
HOST = HostDevice(torch.device("cpu"), arch="bmg")
CASES = [pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (case.law == "ops"))
         for case in all_cases() if case.law != "manifest"]


@cache
def context() -> Context:
    def make() -> Platform:
        return Platform({"graphs": "first"})
    platform = make()
    return Context(platform, platform.probe(), make=make)


def found() -> dict[str, Any]:
    register()
    return dict(operators.matching()[0])


@pytest.mark.parametrize("case", CASES)
def test_law(case: Case) -> None:
    result = run_case(context(), case, Ledger())
    if result.outcome is Outcome.UNSUPPORTED:
        pytest.skip(result.reason)
    assert result.outcome is Outcome.PASSED, f"{result.outcome}: {result.reason}"


# Why it is not there.

@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with an Intel GPU, its driver and a torch for it; a test takes some of it away."""
    have = SimpleNamespace(nodes=tmp_path / "dri", system=tmp_path / "drm", library=True, torch={"xpu": "20260101"})
    for node, vendor in (("renderD128", "0x1002"), ("renderD129", driver.INTEL)):
        (have.nodes / node).mkdir(parents=True)
        (have.system / node / "device").mkdir(parents=True)
        (have.system / node / "device" / "vendor").write_text(vendor + "\n")

    def load(name: str) -> None:
        if not have.library:
            raise OSError(name)
    monkeypatch.setattr(driver, "NODES", have.nodes)
    monkeypatch.setattr(driver, "SYSTEM", have.system)
    monkeypatch.setattr(driver, "WSL", tmp_path / "dxg")
    monkeypatch.setattr(driver.sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(build, "torch_build", lambda: have.torch)
    return have


def test_a_whole_machine_is_worth_importing_torch(machine):
    assert driver.reason_against() is None
    assert driver.intel_nodes() == [machine.nodes / "renderD129"]


def test_each_lack_is_named_with_the_way_out(machine, monkeypatch):
    machine.torch = {"__version__": "2.13.0+cpu"}
    assert "built for host processors only, not for Intel GPUs" in driver.reason_against()
    machine.torch = None
    assert driver.reason_against() == ("torch is not installed: first install the build of torch for Intel GPUs (XPU) "
                                       "that its selector at pytorch.org names, then pip install 'isthmus[xpu]'")
    machine.library = False
    assert "libze_loader.so.1 cannot be loaded): install level-zero" in driver.reason_against()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "add the user to the node's group" in driver.reason_against()
    (machine.system / "renderD129" / "device" / "vendor").unlink()
    assert "no Intel GPU found" in driver.reason_against() and "--platform=cpu" in driver.reason_against()
    monkeypatch.setattr(driver.sys, "platform", "darwin")
    assert "--platform=mlx" in driver.reason_against()


def test_in_windows_own_linux_the_loader_decides(machine):
    driver.WSL.touch()
    for vendor in machine.system.glob("*/device/vendor"):
        vendor.unlink()
    assert driver.reason_against() is None


def test_serve_ends_at_once_with_a_reason():
    reason = driver.reason_against()
    if reason is None:
        pytest.skip("this machine has an Intel GPU")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "isthmus.core.cli.main", "serve", "--platform=xpu"], text=True,
                          capture_output=True, timeout=600)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2 and reason in done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


def test_a_torch_without_a_device_is_told():
    with pytest.raises(Unavailable, match="finds no usable Intel GPU: `sycl-ls`"):
        runtime.XpuPlatform({}).probe()
    with pytest.raises(Unavailable, match="operators='no': one of on, off"):
        runtime.XpuPlatform({"operators": "no"}).switches()
    with pytest.raises(Unavailable, match="did you mean operators"):
        runtime.XpuPlatform({"operator": "on"}).probe()


def test_families_follow_from_the_number_of_the_device():
    numbers = {0x0BD5: "pvc", 0xE20B: "bmg", 0x64A0: "lnl", 0x56A0: "dg2", 0x1234: "xe"}
    assert {number: runtime.family_of(number) for number in numbers} == numbers


def test_graphs_are_tried_and_the_reason_is_told():
    told = graph.graphs(HOST)
    assert told.startswith("steps are launched eagerly: torch.accelerator.Graph: ") and "torch.xpu.XPUGraph" in told
    if not torch.xpu.is_available():
        assert isinstance(graph.reason_against(graph.sycl_graph(), HOST), str)


# What is called.

def test_every_schema_has_a_reference_and_is_found():
    assert found().keys() == KERNELS.keys()
    assert {name.partition("::")[2] for name in operators.expected()} == KERNELS.keys()


def test_an_operator_of_another_schema_is_left_alone(monkeypatch):
    found()
    other = operators.expected() | {"_C::rms_norm": "_C::rms_norm(Tensor! out, Tensor input, float eps) -> ()",
                                    "_C::of_a_later_version": "_C::of_a_later_version(Tensor x) -> ()"}
    monkeypatch.setattr(operators, "expected", lambda: other)
    here, left = operators.matching()
    assert left == ("rms_norm", "of_a_later_version") and "rms_norm" not in here
    kernels = XpuKernels(HOST, Kernels(HOST), here, "")
    weight = kernels.load([raw(np.ones(8, np.float32))], WeightSpec(("norm",), "norm"), "bf16")
    assert kernels.rms_norm(torch.ones(2, 8, dtype=torch.bfloat16), weight, 1e-6).shape == (2, 8)


def test_without_the_package_torch_serves_and_says_so():
    about = make_kernels(HOST, triton=False).describe()
    if operators.find_spec(operators.PACKAGE) is None:
        assert about["operators"] == "vllm-xpu-kernels is not installed" and about["called"] == "none"
    assert make_kernels(HOST, operators=False, triton=False).describe()["operators"] == "turned off by an option"


@pytest.mark.parametrize("name, wrong", {
    "rms_norm": {"eps": 1e-6}, "fp8_gemm_w8a16": {"B_scale": None}, "int4_gemm_w4a16": {"zero": None},
    "moe_gather": {"topk_ids": None}, "varlen_fwd": {"q_descale": None}, "remap_hidden_states": {"experts": 8},
    "cutlass_grouped_gemm_interface": {"is_B_int4": False}, "reshape_and_cache_flash": {"scale": 1.0}}.items())
def test_a_wrong_keyword_is_refused(name: str, wrong: dict[str, Any]):
    with pytest.raises(RuntimeError, match="Unknown keyword argument|missing value for argument"):
        found()[name](**wrong)


def test_a_wrong_dtype_is_refused():
    ops, x = found(), torch.ones(2, 8, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="expected scalar type torch.bfloat16"):
        ops["rms_norm"](result=torch.empty_like(x), input=x, weight=torch.ones(8), epsilon=1e-6)
    cache, key = torch.zeros(2, 2, 16, 1, 8, dtype=torch.bfloat16), x[:, None]
    with pytest.raises(RuntimeError, match="expected scalar type Long"):
        ops["reshape_and_cache_flash"](key, key, cache[:, 0], cache[:, 1], torch.tensor([16, 17], dtype=torch.int32),
                                       "auto", torch.ones(1), torch.ones(1))


def called_by(model: str, dtype: str, monkeypatch) -> set[str]:
    """Operators that a prefill and a decode step of a model call."""
    names: set[str] = set()
    kernels = context().platform._runtime.kernels
    counted = {name: (lambda *args, _n=name, _o=op, **given: (names.add(_n), _o(*args, **given))[1])
               for name, op in kernels.operators.items()}
    monkeypatch.setattr(kernels, "operators", counted)
    monkeypatch.setattr(kernels.products, "operators", counted)
    monkeypatch.setattr(kernels.backends[0], "varlen_fwd", counted["varlen_fwd"])
    driven, tokens = Driver(placed(context(), model, dtype)), text(9, 0, model)
    driven.logits((1, tokens[:8]))
    driven.logits((1, tokens[8:9]))
    return names


def test_a_step_calls_them(monkeypatch):
    usual = {"rms_norm", "varlen_fwd", "reshape_and_cache_flash"}
    assert called_by("llama", "bf16", monkeypatch) == usual | {"silu_and_mul"}
    assert called_by("mixtral", "bf16", monkeypatch) == usual | {
        "silu_and_mul", "remap_hidden_states", "cutlass_grouped_gemm_interface", "moe_gather"}
    assert called_by("llama", "f32", monkeypatch) == {"rms_norm", "silu_and_mul"}


def test_a_sparse_decode_step_is_one_graph():
    driven, tokens = Driver(placed(context(), "mixtral", "bf16")), text(12, 0, "graph")
    driven.logits((1, tokens[:8]))
    driven.logits((1, tokens[8:9]))
    before = RecordedGraph.replayed
    driven.logits((1, tokens[9:10]))
    assert RecordedGraph.replayed == before + 1


# Choices.

@pytest.mark.parametrize("why, dtype, page, spec", [
    ("float32", torch.float32, 16, AttentionSpec(1.0)), ("a cap", torch.bfloat16, 16, AttentionSpec(1.0, None, 5.0)),
    ("pages of 8", torch.bfloat16, 8, AttentionSpec(1.0)),
    ("not compiled", torch.bfloat16, 32, AttentionSpec(1.0, 7))])
def test_attention_that_is_not_its_own_goes_on_to_the_next(why: str, dtype: torch.dtype, page: int,
                                                           spec: AttentionSpec):
    kernels = XpuKernels(HOST, Kernels(HOST), found(), "")
    q, cache = torch.zeros(3, 4, 32, dtype=dtype), LayerCache(torch.zeros(2, 2, page, 2, 32, dtype=dtype))
    chosen = kernels.backend(q, cache, spec)
    assert chosen is kernels.backends[1]
    refused = kernels.backends[0].refused
    assert refused == ({spec: "Paged decode kernel tuple not compiled for this configuration."}
                       if why == "not compiled" else {})


def test_a_case_is_tried_once():
    tried = []
    varlen_fwd = found()["varlen_fwd"]
    backend = PagedAttention(lambda **given: (tried.append(given["max_seqlen_q"]), varlen_fwd(**given)))
    kernels = XpuKernels(HOST, Kernels(HOST), {}, "")
    kernels.backends = (backend, *kernels.backends)
    q, cache = torch.zeros(3, 4, 32, dtype=torch.float16), LayerCache(torch.zeros(2, 2, 16, 2, 32, dtype=torch.float16))
    for _ in range(3):
        assert kernels.backend(q, cache, AttentionSpec(1.0, 9)) is backend
    assert tried == [1, 2]


def test_an_error_in_the_trial_is_no_refusal():
    varlen_fwd = found()["varlen_fwd"]
    backend = PagedAttention(lambda **given: varlen_fwd(**given, of_another_version=1))
    q, cache = torch.zeros(3, 4, 32, dtype=torch.float16), LayerCache(torch.zeros(2, 2, 16, 2, 32, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="expected at most 29 argument"):
        backend.takes(q, cache, AttentionSpec(1.0))


def test_halves_of_one_product_are_read_where_they_lie():
    both = torch.randn(3, 16)
    assert joined(both[:, :8], both[:, 8:]).data_ptr() == both.data_ptr()
    for gate, up in ((both[:, 8:], both[:, :8]), (both[:, :8], both[:, :8].clone()), (both[:, :1], both[:, 1:]),
                     (both[:, :4], both[:, 4:8]), (both[:2, :8], both[1:, 8:])):
        assert joined(gate, up) is None
    kernels = XpuKernels(HOST, Kernels(HOST), found(), "")
    for kind in ("silu", "gelu", "gelu_tanh", "sigmoid"):
        torch.testing.assert_close(kernels.act_mul(both[:, :8], both[:, 8:], kind), act_mul(*both.chunk(2, -1), kind))


def raw(values: np.ndarray) -> RawTensor:
    return RawTensor("f32", values.shape, np.ascontiguousarray(values, np.float32).view(np.uint8))


def test_norms_that_the_compute_dtype_rounds_stay_in_float32():
    for weight, exact in ((np.array([1.0, 0.5]), True), (np.array([1.0, 1.001]), False)):
        values = torch.tensor(weight, dtype=torch.float32)
        assert quant.Norm.of(Vector(values, values.bfloat16())).exact is exact


@pytest.mark.parametrize("name, dtype, kept", [
    ("q4_0", "f16", True), ("q4_0", "bf16", False), ("q4_0", "f32", False), ("q4_1", "f16", False),
    ("awq4", "f16", True), ("gptq4", "f16", True), ("pack4", "f16", None), ("pack4_asym", "f16", None),
    ("fp8", "bf16", True), ("fp8", "f16", True), ("fp8", "f32", False)])
def test_a_weight_is_kept_where_the_operator_computes_its_values(name: str, dtype: str, kept: bool | None):
    """None: the scales of the made tensor decide."""
    ops = found()
    part, _ = quantized(np.random.default_rng(1), name, (24, 256))
    made = (quant.fp8([part, part], dtype, HOST, ops["fp8_gemm_w8a16"]) if name == "fp8" else
            quant.int4([part, part], dtype, HOST, ops["int4_gemm_w4a16"]))
    assert kept is None or (made is not None) is kept
    if made is not None:
        kind = quant.DTYPES[dtype]
        x, bias = torch.randn(5, 256, dtype=kind), torch.randn(48, dtype=kind)
        dense = Dense(torch.from_numpy(np.concatenate([expand(part)] * 2)))
        want = dense.product(x.float(), bias.float())
        torch.testing.assert_close(made.product(x, bias).float(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


def test_one_zero_point_is_one_number_and_several_are_words():
    rng, ops = np.random.default_rng(2), found()
    one = quant.int4([quantized(rng, "q4_0", (8, 64))[0]], "f16", HOST, ops["int4_gemm_w4a16"])
    assert one.zero.dtype == torch.int8 and one.zero.tolist() == [8] and one.codes.shape == (8, 8)
    many = quant.int4([quantized(rng, "awq4", (16, 256))[0]], "f16", HOST, ops["int4_gemm_w4a16"])
    assert many.zero.dtype == torch.int32 and many.zero.shape == (256 // many.group, 2)


def test_what_the_probe_says_is_within_the_manifest():
    claim, manifest = read_file(ROOT / "platforms" / "xpu" / "manifest.toml"), context().manifest
    assert set(manifest.formats) <= set(claim.formats) and set(manifest.kv_dtypes) <= set(claim.kv_dtypes)
    assert set(manifest.formats) == {"fp8", *quant.FOUR_BITS}
    assert claim.options == {"graphs": MODES, "operators": runtime.SWITCHES, "triton": runtime.SWITCHES}
    assert manifest.details["operators"] == "reference kernels"
