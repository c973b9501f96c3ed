"""The npu platform without an NPU: why it is not there, what it gives to torch_npu's operators, and the laws on the
CPU, where the operators are registered under torch_npu's own schemas (tests/emulation/npu)."""
from __future__ import annotations

import ctypes
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from isthmus.conformance import Case, Context, Outcome, all_cases, run_case
from isthmus.conformance.driver import Driver
from isthmus.conformance.formats import quantized
from isthmus.conformance.ledger import Ledger
from isthmus.conformance.ops_attention import Shape, case, copied, exported
from isthmus.conformance.ops_run import as_case
from isthmus.conformance.oracle import placed, text
from isthmus.core.discovery import load_platform
from isthmus.core.manifests import read_file
from isthmus.core.platform import AttentionSpec, MoESpec, RawTensor, Unavailable, WeightSpec
from isthmus.platforms.accelerator.base import MODES
from isthmus.platforms.accelerator.cache import LayerCache
from isthmus.platforms.npu import driver, moe, quant
from isthmus.platforms.npu.attention import reason_against
from isthmus.platforms.npu.graph import npu_graphs
from isthmus.platforms.npu.runtime import CHOICES, NpuPlatform

from .emulation.npu.operators import KERNELS, Calls, schemas
from .emulation.npu.platform import Platform
from .emulation.recorder import RecordedGraph

ROOT = Path(__file__).resolve().parent.parent
COST = 60  # seconds, beside the laws, which take as long as conformance


class Wide(Platform):
    """With the pages that every model's prefill is fused with."""

    page_sizes = (128,)


# Why it is not there.

@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with one NPU, CANN and packages that fit; a test takes some of it away."""
    (tmp_path / "davinci0").touch()
    (tmp_path / driver.MANAGER).touch()
    have = SimpleNamespace(nodes=tmp_path, cann=None, torch={"__version__": "2.13.0+cpu"}, npu="2.13.0.post1")

    def load(name: str) -> None:
        if have.cann:
            raise OSError(have.cann)

    def version(name: str) -> str:
        if have.npu is None:
            raise driver.PackageNotFoundError(name)
        return have.npu
    monkeypatch.setattr(driver, "NODES", tmp_path)
    monkeypatch.setattr(driver, "TOOLKIT", tmp_path / "toolkit")
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(driver, "version", version)
    monkeypatch.setattr(driver, "torch_build", lambda: have.torch)
    monkeypatch.setattr(sys, "platform", "linux")
    return have


def test_a_whole_machine_has_no_reason(machine) -> None:
    assert driver.reason_against() is None


def test_the_driver_is_missed_first(machine) -> None:
    machine.cann = machine.npu = machine.torch = None
    (machine.nodes / "davinci0").unlink()
    assert "shows no NPU" in driver.reason_against() and "npu-smi info" in driver.reason_against()
    (machine.nodes / driver.MANAGER).unlink()
    assert "no Ascend driver found" in driver.reason_against() and "--platform=cpu" in driver.reason_against()


def test_other_systems_have_no_driver(machine, monkeypatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux only" in driver.reason_against()


def test_cann_is_missed(machine) -> None:
    machine.cann = "libascendcl.so: cannot open shared object file: No such file or directory"
    assert "install the CANN toolkit" in driver.reason_against()
    (machine.nodes / "toolkit").mkdir()
    (machine.nodes / "toolkit" / "set_env.sh").touch()
    assert f"source {machine.nodes}/toolkit/set_env.sh" in driver.reason_against()
    machine.cann = "libascend_hal.so: cannot open shared object file: No such file or directory"
    assert "libascend_hal.so" in driver.reason_against() and "the driver's libraries" in driver.reason_against()


def test_packages_are_missed(machine) -> None:
    machine.npu = "2.12.0"
    assert "torch_npu 2.12.0 was built for torch 2.12.0, and torch 2.13.0 is installed" in driver.reason_against()
    machine.npu = None
    assert driver.reason_against().endswith("pip install torch-npu==2.13.0")
    machine.torch = None
    assert "torch is not installed" in driver.reason_against()


def test_the_server_says_why_without_torch() -> None:
    """torch takes seconds to import; here it cannot be imported."""
    if driver.reason_against() is None:
        pytest.skip("there is an NPU")
    code = ("import sys; sys.modules['torch'] = None; from isthmus.core.cli.main import main; "
            "sys.exit(main(['serve', '--platform=npu']))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode != 0 and driver.reason_against() in done.stdout + done.stderr


@pytest.mark.parametrize("options, message", [
    ({"activations": "4bit"}, "activations='4bit': one of 16bit, 8bit"),
    ({"nz": "on"}, "one of quantized, all, off"), ({"nzz": "on"}, "did you mean nz"),
])
def test_options(options: dict[str, str], message: str) -> None:
    with pytest.raises(Unavailable, match=message):
        Platform(options).probe()


@pytest.mark.parametrize("name, served", [("Ascend910B3", True), ("Ascend910_9391", True), ("Ascend950PR_9599", True),
                                          ("Ascend310P3", False), ("Ascend910A", False), ("Ascend910ProB", False)])
def test_generations(name: str, served: bool) -> None:
    if served:
        return NpuPlatform({}).check(name)
    with pytest.raises(Unavailable, match=f"{name}: Atlas A2"):
        NpuPlatform({}).check(name)


def test_graphs_share_the_first_ones_pool(monkeypatch) -> None:
    begun = []

    class Graph:
        def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
            begun.append((pool, capture_error_mode))

        def capture_end(self) -> None:
            ...

        def pool(self) -> str:
            return "pool"
    monkeypatch.setattr(torch, "npu", SimpleNamespace(NPUGraph=Graph), raising=False)
    make = npu_graphs()
    for _ in range(2):
        graph = make()
        graph.capture_begin()
        graph.capture_end()
    assert begun == [(None, "thread_local"), ("pool", "thread_local")]
    monkeypatch.setattr(torch, "npu", SimpleNamespace(), raising=False)
    assert "no NPUGraph" in npu_graphs()


# What is given to the operators.

@pytest.mark.parametrize("message, heads, kv_heads, dim, page, dtype, kv, spec", [
    (None, 8, 2, 128, 16, "bfloat16", "bfloat16", {}), (None, 8, 2, 64, 128, "float16", "float16", {"window": 5}),
    (None, 64, 1, 512, 512, "bfloat16", "bfloat16", {}),
    ("capped", 8, 2, 128, 128, "bfloat16", "bfloat16", {"softcap": 30.0}),
    ("float32", 8, 2, 128, 128, "float32", "float32", {}), ("float16 over", 8, 2, 128, 128, "float16", "bfloat16", {}),
    ("dimension 40", 8, 2, 40, 128, "bfloat16", "bfloat16", {}),
    ("dimension 576", 8, 1, 576, 128, "float16", "float16", {}),
    ("128 heads over 1", 128, 1, 128, 128, "bfloat16", "bfloat16", {}),
    ("pages of 8", 8, 2, 128, 8, "bfloat16", "bfloat16", {}), ("pages of 64", 8, 2, 64, 64, "bfloat16", "bfloat16", {}),
    ("pages of 64", 8, 2, 128, 64, "bfloat16", "bfloat16", {"window": 5})])
def test_attention_that_is_fused(message: str | None, heads: int, kv_heads: int, dim: int, page: int, dtype: str,
                                 kv: str, spec: dict[str, Any]) -> None:
    q = torch.empty(3, heads, dim, dtype=getattr(torch, dtype), device="meta")
    cache = torch.empty(5, 2, page, kv_heads, dim, dtype=getattr(torch, kv), device="meta")
    reason = reason_against(q, LayerCache(cache), AttentionSpec(0.1, **spec))
    assert reason is None if message is None else message in reason


@pytest.mark.parametrize("spec, fused", [
    (MoESpec(8, 2), True), (MoESpec(8, 2, "sigmoid"), True), (MoESpec(8, 2, "sigmoid", False), False),
    (MoESpec(8, 2, groups=4, top_groups=2), False), (MoESpec(256, 8, "sigmoid", groups=8, top_groups=4), True),
    (MoESpec(4096, 8), False), (MoESpec(9, 4, groups=3, top_groups=1), False)])
def test_choice_of_experts_that_is_fused(spec: MoESpec, fused: bool) -> None:
    assert (moe.reason_against_choice(spec) is None) == fused


def test_an_activation_is_one_launch_where_gate_and_up_lie_side_by_side() -> None:
    both = torch.randn(5, 12)
    with Calls() as calls:
        got = moe.act_mul(both[:, :6], both[:, 6:], "silu")
        assert calls.counts["npu_swiglu"] == 1
        for gate, up in ((both[:, 6:], both[:, :6]), (both[:, :6].clone(), both[:, 6:]), (both[:, :4], both[:, 6:10])):
            moe.act_mul(gate, up, "silu")
        moe.act_mul(both[:, :6], both[:, 6:], "gelu")
        assert calls.counts["npu_swiglu"] == 1
    torch.testing.assert_close(got, torch.nn.functional.silu(both[:, :6]) * both[:, 6:])


@cache
def context(kind: type[Platform], **options: str) -> Context:
    def make() -> Platform:
        return kind({"graphs": "first"} | options)
    platform = make()
    return Context(platform, platform.probe(), make=make)


def loaded(dtype: str, role: str = "linear", raw: RawTensor | None = None, **options: str) -> Any:
    values = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    raw = raw or RawTensor("f32", values.shape, values)
    return context(Platform, **options).platform.load([raw], WeightSpec(("w",), role), dtype)


def int8(rows: int = 32, width: int = 64) -> RawTensor:
    rng = np.random.default_rng(1)
    scale = rng.random((rows, 1), np.float32)
    return RawTensor("int8", (rows, width), rng.integers(-127, 128, (rows, width), np.int8).view(np.uint8),
                     (RawTensor("f32", scale.shape, scale.view(np.uint8)),))


def test_formats_that_are_kept() -> None:
    assert str(loaded("bf16", raw=int8())) == "int8 rows"
    assert str(loaded("f32", raw=int8())) == "float32"
    assert str(loaded("bf16", raw=int8(rows=36))) == "bfloat16"  # outputs that are no multiple of 8
    assert str(loaded("bf16", raw=int8(), activations="8bit")) == "int8, 8-bit activations"


@pytest.mark.parametrize("dtype, format, kept", [
    ("bf16", "q4_0", "2 experts, int4 groups of 32"), ("bf16", "q8_0", "2 experts, bfloat16"),
    ("f16", "q4_1", "2 experts, float16"), ("f32", "q4_0", "2 experts, float32")])
def test_experts_that_are_kept(dtype: str, format: str, kept: str) -> None:
    raws = [quantized(np.random.default_rng(seed), format, (32, 64))[0] for seed in (1, 2)]
    spec = WeightSpec(("a", "b"), "experts", experts=2)
    assert str(context(Platform).platform.load(raws, spec, dtype)) == kept


def test_zeros_are_whole_numbers() -> None:
    codes, scale = np.arange(64, dtype=np.uint8).reshape(1, 64) % 16, np.full((1, 2), 0.5, np.float32)
    centred, offset = quant.centred(codes, scale, np.float32([[-4, -3.5]]), 4)
    np.testing.assert_array_equal(offset, [[0, 1]])
    np.testing.assert_array_equal((centred + np.repeat(offset, 32, 1)) * 0.5,
                                  codes * np.float32(0.5) + np.repeat(np.float32([[-4, -3.5]]), 32, 1))
    assert quant.centred(codes, scale, np.float32([[-4, -3.4]]), 4) is None
    assert quant.centred(codes, np.float32([[0.5, 0]]), np.float32([[-4, -3.5]]), 4) is None
    assert quant.centred(codes.view(np.int8), scale, np.zeros((1, 2), np.float32), 8)[1] is None


def test_the_order_of_blocks() -> None:
    with Calls() as calls:
        assert str(loaded("bf16")) == "bfloat16" and not calls.counts["npu_format_cast"]
        assert str(loaded("bf16", nz="all")) == "bfloat16, NZ" and calls.counts["npu_format_cast"] == 1
        assert str(loaded("f32", nz="all")) == "float32"
        assert str(loaded("bf16", role="embed", nz="all")) == "bfloat16"
        loaded("bf16", raw=int8(), activations="8bit", nz="off")
        assert calls.counts["npu_format_cast"] == 1
    assert not quant.fits_nz(torch.zeros(16, 24, dtype=torch.float16))
    assert not quant.fits_nz(torch.zeros(16, 32, dtype=torch.int8))


def test_a_norm_that_the_compute_dtype_does_not_hold_is_computed_in_float32() -> None:
    kernels = context(Platform).platform._runtime.kernels
    for value, exact in ((1.5, True), (1 + 2 ** -12, False)):
        norm = loaded("bf16", "norm", RawTensor("f32", (64,), np.full(64, value, np.float32)))
        assert norm.exact == exact
        x = torch.randn(3, 64).bfloat16()
        expected = torch.nn.functional.rms_norm(x.float(), (64,), norm.values, 1e-6).bfloat16()
        torch.testing.assert_close(kernels.rms_norm(x, norm, 1e-6), expected)


# The schemas.

def test_every_schema_has_a_kernel_and_every_kernel_a_schema() -> None:
    version, known = schemas()
    assert version == "2.13.0" and set(known) == set(KERNELS)
    assert context(Platform).platform and all(str(getattr(torch.ops.npu, name).default._schema) == schema
                                              for name, schema in known.items())


@pytest.mark.parametrize("call", {
    "keyword": lambda x, g: torch.ops.npu.npu_rms_norm(x, g, eps=1e-6),
    "missing": lambda x, g: torch.ops.npu.npu_rms_norm(x),
    "kind": lambda x, g: torch.ops.npu.npu_rms_norm(x, [g]),
    "dtype": lambda x, g: torch.ops.npu.npu_rms_norm(x, g.half()),
    "not contiguous": lambda x, g: torch.ops.npu.npu_format_cast(x.half().T, 29)}.values())
def test_a_wrong_call_fails(call) -> None:
    context(Platform)
    with pytest.raises((RuntimeError, TypeError)):
        call(torch.ones(4, 8), torch.ones(8))


def test_the_emulation_claims_what_the_platform_claims() -> None:
    own, emulated = (read_file(ROOT / folder / "npu" / "manifest.toml") for folder in ("platforms", "tests/emulation"))
    assert msgspec.structs.replace(own, rank=Platform.rank, ci=()) == emulated
    assert own.formats == quant.KEPT and own.page_sizes == NpuPlatform.page_sizes
    assert own.options == {"graphs": MODES} | CHOICES


def test_an_emulation_is_never_taken_before_the_host() -> None:
    """By its probe, which counts where no platform is named."""
    assert Platform({"graphs": "off"}).probe().rank < load_platform("cpu").probe().rank == 10


# The laws.

def hold(context: Context, law: Case) -> None:
    result = run_case(context, law, Ledger())
    if result.outcome is Outcome.UNSUPPORTED:
        pytest.skip(result.reason)
    assert result.outcome is Outcome.PASSED, f"{result.outcome}: {result.reason}"


@pytest.mark.slow
@pytest.mark.laws
@pytest.mark.parametrize("law", [pytest.param(c, id=str(c)) for c in all_cases() if c.law != "manifest"])
def test_law(law: Case) -> None:
    """Every step is captured at its first launch and replayed at later ones."""
    hold(context(Platform), law)


@pytest.mark.slow
@pytest.mark.parametrize("law", [pytest.param(c, id=str(c)) for c in all_cases() if c.law in ("model", "compile")
                                 and str(c).endswith(("bf16]", ",f16]"))])
def test_law_with_attention_fused(law: Case) -> None:
    """The kit's models have heads of 16 and 32, whose attention is fused with pages of 128."""
    with Calls() as calls:
        hold(context(Wide), law)
    other = law.law == "compile" or ",kv_" in str(law)  # no attention; K and V of another dtype, which are composed
    assert other or calls.counts["npu_fused_infer_attention_score"]


FUSED = {"ragged": (Shape(4, 2, 128, 16), {"poison": True}), "ragged_rows": (Shape(4, 2, 128, 32), {"padding": (0, 3)}),
         "ragged_copied": (Shape(8, 1, 128, 16), {"move": copied}),
         "ragged_exported": (Shape(8, 1, 128, 16), {"move": exported}),
         "wide_head": (Shape(4, 1, 256, 128), {}), "window1": (Shape(4, 2, 32, 128), {"window": 1}),
         "window200": (Shape(4, 2, 128, 128), {"window": 200, "poison": True}),
         "window1000": (Shape(4, 2, 32, 128), {"window": 1000, "padding": (0, 0)})}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("ragged", "window200")))
                                  for name in FUSED])
def test_fused_attention(name: str) -> None:
    shape, more = FUSED[name]
    with Calls() as calls:
        hold(context(Platform), as_case(case(name, shape, "bf16", **more)))
    assert calls.counts["npu_fused_infer_attention_score"]


def test_a_decode_step_is_graphs_with_fused_attention_between() -> None:
    """The operator's lengths are the host's: captured, they would be those of the capture."""
    model = placed(context(Wide), "llama", "bf16")
    tokens, driver = text(12, 0, "graphs"), Driver(model)
    driver.logits((1, tokens[:8]))
    for token in tokens[8:10]:
        driver.logits((1, [token]))
    before = RecordedGraph.replayed
    with Calls() as calls:
        driver.logits((1, [tokens[10]]))
    layers = len(model.loaded.state_layers)
    assert RecordedGraph.replayed - before == layers + 1
    assert calls.counts["npu_fused_infer_attention_score"] == layers
