"""What the cpu platform promises beyond its ops: order of steps, kept formats, large batches, memory, options."""
from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the cpu platform needs torch")

from isthmus.conformance.formats import quantized  # noqa: E402
from isthmus.conformance.opcase import token_batch  # noqa: E402
from isthmus.core.plan import Batch, Sampling  # noqa: E402
from isthmus.core.platform import LayerState, MoESpec, StateSpec, Unavailable, Unsupported, WeightSpec  # noqa: E402
from isthmus.platforms.cpu import moe, quant  # noqa: E402
from isthmus.platforms.cpu.kept import HALVES, LayerCache, huge_zeros  # noqa: E402
from isthmus.platforms.cpu.memory import HUGE  # noqa: E402
from isthmus.platforms.cpu.platform import Platform, told_threads  # noqa: E402
from isthmus.platforms.cpu.sampling import CANDIDATES, sample  # noqa: E402
from isthmus.platforms.experts import by_expert  # noqa: E402

COST = 25  # seconds
SPEC = StateSpec((LayerState(2, 32), LayerState(1, 64)), "f32", 16, 8)


@pytest.fixture(scope="module")
def platform() -> Any:
    made = Platform({"threads": "2"})
    made.probe()
    yield made
    made.close()


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def test_options_are_refused_with_the_way_out():
    with pytest.raises(Unavailable, match="no option speed; it has threads"):
        Platform({"speed": "9"}).probe()
    for bad in ("0", "-1", "many", "1025"):
        with pytest.raises(Unavailable, match="from 1 to 1024"):
            Platform({"threads": bad}).probe()
    with pytest.raises(Unavailable, match="probe"):
        Platform({}).compile(lambda ops, weights, batch: None, {}, None)


def test_manifest_says_what_runs(platform):
    manifest = Platform({"threads": "1"}).probe()
    assert manifest.details["threads"] == "1" and ", 1 thread, " in manifest.device
    assert Platform({"kernels": "torch"}).probe().device.endswith("torch kernels")
    assert sorted(manifest.compute_dtypes) == ["bf16", "f32"]
    assert manifest.page_sizes[0] == 16
    assert 0 < manifest.memory_free <= manifest.memory_total


def test_a_step_returns_before_it_is_done_and_errors_wait_for_collect(platform):
    """Three launches while the first is held: none blocks, they run in order, the failing one harms no other."""
    gate, order = threading.Event(), []

    def forward(ops: Any, weights: Any, batch: Batch) -> Any:
        name = int(batch.positions[0])
        if name == 0:
            assert gate.wait(120)
        order.append(name)
        if name == 1:
            raise ValueError("step 1 fails")
        return ops.embed(batch.tokens, weights)

    table = platform.load([quantized(np.random.default_rng(0), "f32", (8, 4))[0]], WeightSpec(("w",), "embed"), "f32")
    step, state, outs = platform.compile(forward, table, None), platform.alloc(SPEC, 2), []
    for name in range(3):
        out, state = step(state, token_batch(2, np.full(2, name)))
        outs.append(out)
    assert order == []
    gate.set()
    assert outs[0].collect().shape == (2, 4)
    with pytest.raises(ValueError, match="step 1 fails"):
        outs[1].collect()
    assert outs[2].collect().shape == (2, 4)
    assert order == [0, 1, 2]


@pytest.mark.parametrize("name", quant.KEPT)
@pytest.mark.parametrize("tokens", [3, quant.MANY])
def test_kept_formats_are_as_exact_as_expanded_bf16(name, tokens):
    """Few tokens by torch's int4 kernel, many by expanding pieces: neither loses more than rounding weights does."""
    rng = np.random.default_rng(1)
    raw, values = quantized(rng, name, (192, 256))
    x = torch.from_numpy(rng.normal(size=(tokens, 256))).bfloat16()
    with torch.inference_mode():
        leaf = quant.load_weight([raw], WeightSpec(("w",), "linear"), "bf16")
        assert isinstance(leaf, quant.Int4Groups)
        got = leaf.product(x).double().numpy()
    expected = x.double().numpy() @ values.T
    dense = (x.double() @ torch.from_numpy(values).bfloat16().double().T).bfloat16().double().numpy()
    assert relative(got, expected) < 1.5 * relative(dense, expected)


def sparse_layer(name: str, dtype: str = "bf16", experts: int = 6, apart: bool = False) -> tuple[Any, Any]:
    """w13 and w2 of experts of width 64 over 64, in one format."""
    rng, made = np.random.default_rng(7), []
    for rows in (128, 64):
        raw, _ = quantized(rng, name, (experts, rows, 64))
        raws = [raw] if not apart else [part for one in by_expert([raw], WeightSpec(("w",), "experts")) for part in one]
        made.append(quant.load_weight(raws, WeightSpec(("w",), "experts", None, experts), dtype))
    return made[0], made[1]


@pytest.mark.parametrize("name", ["bf16", "q4_1", "q8_0", "affine4_64", "affine8_32"])
def test_a_row_of_a_sparse_layer_does_not_depend_on_the_batch(name):
    spec = MoESpec(6, 2)
    x, logits = torch.randn(40, 64).bfloat16(), torch.randn(40, 6).bfloat16()
    with torch.inference_mode():
        w13, w2 = sparse_layer(name)
        assert str(w13) == f"6 experts, {'bfloat16' if name == 'bf16' else f'int{4 * w13.parts[0].digits}'}"
        together = moe.moe(x, logits, w13, w2, spec)
        alone = torch.cat([moe.moe(x[i:i + 1], logits[i:i + 1], w13, w2, spec) for i in range(40)])
        apart = moe.moe(x, logits, *sparse_layer(name, apart=True), spec)
    assert torch.equal(together, alone) and torch.equal(together, apart)


def test_only_the_experts_that_are_used_compute():
    class Noted(quant.Experts):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            return tuple(Seen(number, part) for number, part in enumerate(value)) if name == "parts" else value

    class Seen:
        def __init__(self, number: int, part: Any) -> None:
            self.number, self.part = number, part

        def product(self, x: torch.Tensor) -> torch.Tensor:
            used.append((self.number, len(x)))
            return self.part.product(x)

    used: list[tuple[int, int]] = []
    logits = torch.full((3, 6), -9.0)
    logits[0, 1] = logits[1, 4] = logits[2, 4] = 9
    with torch.inference_mode():
        w13, w2 = (Noted(leaf.parts) for leaf in sparse_layer("bf16"))
        moe.moe(torch.randn(3, 64).bfloat16(), logits, w13, w2, MoESpec(6, 1))
    assert used == [(1, 1), (4, 2)] * 2


def test_formats_of_experts_are_kept_in_bfloat16_only(platform):
    for name in ("q4_1", "affine8_64"):
        asked = dict(experts=8, top_k=2, format=name)
        assert platform.supports("moe", **asked, dtype="bf16") is None
        assert "scalar in float32" in platform.supports("moe", **asked, dtype="f32")
        with torch.inference_mode():
            assert str(sparse_layer(name, "f32")[0]) == "6 experts, float32"


@pytest.mark.parametrize("name", ["q4_0", "affine8_64"])
@pytest.mark.parametrize("outputs", [1, 10, 33])
def test_any_number_of_outputs_stays_quantized(name, outputs):
    raw, values = quantized(np.random.default_rng(9), name, (outputs, 256))
    x, bias = torch.randn(3, 256).bfloat16(), torch.randn(outputs).bfloat16()
    with torch.inference_mode():
        leaf = quant.load_weight([raw], WeightSpec(("w",), "linear"), "bf16")
        got = leaf.product(x, bias).double().numpy()
    assert isinstance(leaf, quant.Int4Groups) and got.shape == (3, outputs)
    assert relative(got, x.double().numpy() @ values.T + bias.double().numpy()) < 1e-2


def test_expansion_in_pieces_joins_them_in_order(monkeypatch):
    raw, values = quantized(np.random.default_rng(2), "q4_1", (320, 64))
    x = torch.randn(quant.MANY, 64).bfloat16()
    with torch.inference_mode():
        leaf = quant.load_weight([raw], WeightSpec(("w",), "linear"), "bf16")
        if not leaf.expandable:
            pytest.skip("this processor's int4 layout is not the one that is understood")
        whole = leaf.product(x)
        monkeypatch.setattr(quant, "PIECE", 128 * 64)
        assert torch.equal(leaf.product(x), whole)
    assert relative(whole.double().numpy(), x.double().numpy() @ values.T) < 1e-2


def test_float32_expands_and_equals_the_dequantized_values():
    raw, values = quantized(np.random.default_rng(3), "q4_1", (64, 96))
    x = torch.randn(5, 96)
    with torch.inference_mode():
        leaf = quant.load_weight([raw], WeightSpec(("w",), "linear"), "f32")
        got = leaf.product(x).double().numpy()
    assert str(leaf) == "float32"
    assert relative(got, x.double().numpy() @ values.T) < 1e-6


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_without_onednn_products_are_the_same(dtype, monkeypatch):
    raw, values = quantized(np.random.default_rng(5), "bf16", (48, 64))
    x = torch.randn(4, 64).to(quant.DTYPES[dtype])
    results = []
    for available in (torch.backends.mkldnn.is_available(), False):
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda available=available: available)
        with torch.inference_mode():
            results.append(quant.load_weight([raw], WeightSpec(("w",), "linear"), dtype).product(x).double().numpy())
    for got in results:
        assert relative(got, x.double().numpy() @ values.T) < {"f32": 1e-6, "bf16": 5e-3}[dtype]


def test_unknown_formats_and_dtypes_are_named(platform):
    raw, _ = quantized(np.random.default_rng(0), "f32", (16, 32))
    with pytest.raises(Unsupported, match="f64"):
        platform.load([raw], WeightSpec(("w",), "linear"), "f64")
    with pytest.raises(Unsupported, match="w: format iq1_s is unknown"):
        platform.load([raw._replace(dtype="iq1_s")], WeightSpec(("w",), "linear"), "f32")
    with pytest.raises(Unsupported, match="f16"):
        platform.alloc(StateSpec(SPEC.layers, "f16", 16, 4), 2)
    assert "iq1_s" in platform.supports("linear", format="iq1_s", dtype="bf16")
    assert "float32" in platform.supports("linear", format="q4_1", dtype="f32")
    assert platform.supports("linear", format="q4_1", dtype="bf16") is None
    assert "telepathy" in platform.supports("telepathy")


def test_pages_of_the_wrong_size_are_refused(platform):
    state = platform.alloc(SPEC, 4)
    data = platform.export_pages(state, [1, 3])
    assert len(data) == 2 * SPEC.page_bytes()
    with pytest.raises(ValueError, match=f"3 pages take {3 * SPEC.page_bytes()} bytes, not {len(data)}"):
        platform.import_pages(state, [1, 2, 3], data)


def test_huge_memory_starts_as_zeros_on_a_huge_page():
    memory = huge_zeros((3, HUGE), torch.bfloat16)
    assert memory.shape == (3, HUGE) and not memory.any()
    assert memory.data_ptr() % HUGE == 0
    memory[2, -1] = 1
    assert memory.sum() == 1


def by_hand(logits: np.ndarray, sampling: Sampling, row: int) -> int:
    """One draw over a full sort, in float64."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    weights = np.exp((logits - logits.max()) / sampling.temperature[row])
    kept = order[:sampling.top_k[row]] if sampling.top_k[row] else order
    cumulative = np.cumsum(weights[kept])
    kept = np.sort(kept[:1 + np.searchsorted(cumulative, sampling.top_p[row] * cumulative[-1])])
    cumulative = np.cumsum(weights[kept])
    return int(kept[np.searchsorted(cumulative, sampling.uniform[row] * cumulative[-1], side="right")])


def test_rows_that_the_candidates_do_not_settle_look_at_everything():
    """Flat logits need more than `CANDIDATES`, and ties at the border must fall to the lower ids."""
    vocabulary, rng = 4 * CANDIDATES, np.random.default_rng(4)
    logits = rng.normal(size=(6, vocabulary)).astype(np.float32)
    logits[1] *= 1e-3                                          # nearly flat: top-p keeps most of the vocabulary
    logits[2] = rng.integers(0, 2, vocabulary)                 # half of all tie for the best
    logits[3] = rng.integers(0, 2, vocabulary)
    values = Sampling(np.ones(6, np.float32), rng.random(6, np.float32),
                      np.array([5, 0, 7, CANDIDATES + 9, 3 * CANDIDATES, 0], np.int32),
                      np.array([1, 0.8, 1, 0.9, 1, 0.3], np.float32))
    with torch.inference_mode():
        got = sample(torch.from_numpy(logits), np.full(6, -1, np.int32), values, np.zeros(6, np.int32)).tokens
    assert got.tolist() == [by_hand(row.astype(np.float64), values, i) for i, row in enumerate(logits)]


def test_a_fully_banned_row_gives_its_lowest_id_not_an_error():
    logits = torch.full((2, 40), -torch.inf)
    for top_k in (None, np.array([3, 0], np.int32)):
        values = Sampling(np.ones(2, np.float32), np.full(2, 0.9, np.float32), top_k)
        with torch.inference_mode():
            assert sample(logits, np.full(2, -1, np.int32), values, np.zeros(2, np.int32)).tokens.tolist() == [0, 0]


@pytest.mark.parametrize("threads, world, cores, told", [
    (1, 1, 1, "1 thread"), (4, 1, 4, "4 threads"), (2, 2, 4, "2 threads"),
    (8, 1, 2, "8 threads on 2 cores (warning: they take turns, which is slow)"),
    (2, 1, 1, "2 threads on 1 core (warning: they take turns, which is slow)"),
    (4, 2, 4, "4 threads in each of 2 ranks on 4 cores (warning: they take turns, which is slow)")])
def test_more_threads_than_cores_are_warned_of_with_the_numbers(threads, world, cores, told):
    assert told_threads(threads, world, cores) == told


def test_the_banner_gets_the_warning(monkeypatch):
    monkeypatch.setattr("isthmus.platforms.cpu.platform.physical_cores", lambda: 1)
    platform = Platform({"threads": "2"})
    assert "2 threads on 1 core (warning" in platform.probe().device
    platform.close()


def test_one_thread_has_the_only_openmp_team():
    """A second team would leave more OpenMP threads than cores, which then sleep between parallel regions."""
    code = """
import numpy as np, psutil, torch
from isthmus.core.platform import LayerState, RawTensor, StateSpec, WeightSpec
from isthmus.platforms.cpu.platform import Platform
platform = Platform({"threads": "2"})
platform.probe()
before = psutil.Process().num_threads()
data = np.ones((4096, 1024), np.float32)
leaf = platform.load([RawTensor("f32", data.shape, data.view(np.uint8))], WeightSpec(("w",), "linear"), "f32")
state = platform.alloc(StateSpec((LayerState(8, 64),), "f32", 16, 4), 2048)
platform.copy_pages(state, [1], [2])
print(psutil.Process().num_threads() - before, torch.get_num_threads())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["2", "2"], done.stdout + done.stderr  # the worker and its one helper


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
def test_every_8_bit_float_is_read_as_its_value(dtype, into):
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(dtype).to(into)
    got = LayerCache(codes, dtype).values(codes, None, into)
    assert torch.equal(got[want.isfinite()], want[want.isfinite()]) and want.isfinite().sum() > 240
