"""What the mlx platform promises beyond its ops: exact repacking, K and V written in place, one trace for each bucket,
a memory budget that gives back, sampling over a large vocabulary, and the Metal kernel, run thread by thread in C++."""
from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="the mlx platform needs mlx")

from isthmus.conformance.formats import quantized  # noqa: E402
from isthmus.conformance.opcase import token_batch  # noqa: E402
from isthmus.core.plan import Batch, Bias, Penalties, Sampling  # noqa: E402
from isthmus.core.platform import (  # noqa: E402
    AttentionSpec,
    Bucket,
    LayerState,
    RopeSpec,
    StateSpec,
    Unavailable,
    Unsupported,
    WeightSpec,
)
from isthmus.platforms.expand import expand  # noqa: E402
from isthmus.platforms.mlx import attention, memory, quant  # noqa: E402
from isthmus.platforms.mlx.ops import Turns  # noqa: E402
from isthmus.platforms.mlx.platform import Platform  # noqa: E402
from isthmus.platforms.mlx.sampling import cumulative, sample  # noqa: E402

from .metal_in_cpp import run_decode_kernel  # noqa: E402

COST = 50  # seconds
SPEC = StateSpec((LayerState(2, 32), LayerState(1, 64)), "f32", 16, 8)
HOST = quant.Device(metal=False)


@pytest.fixture(scope="module")
def platform() -> Any:
    made = Platform({})
    made.probe()
    yield made
    made.close()


def table(platform: Any, rows: int = 8, width: int = 64) -> Any:
    raw, _ = quantized(np.random.default_rng(0), "f32", (rows, width))
    return platform.load([raw], WeightSpec(("w",), "embed"), "f32")


# Life cycle.

def test_options_and_ranks_are_refused_with_the_way_out():
    with pytest.raises(Unavailable, match="no option speed; it has memory_share, threads"):
        Platform({"speed": "9"}).probe()
    for bad in ("0", "-1", "much", "1.5", "nan"):
        with pytest.raises(Unavailable, match="over 0 up to 1"):
            Platform({"memory_share": bad}).probe()
    with pytest.raises(Unavailable, match="4 ranks"):
        Platform({}).probe(rank=1, world=4)
    with pytest.raises(Unavailable, match="probe"):
        Platform({}).compile(lambda ops, weights, batch: None, {}, None)


def test_manifest_is_honest_about_the_device(platform):
    made = Platform({"memory_share": "0.5"})
    manifest = made.probe()
    assert manifest.rank == (20 if mx.metal.is_available() else 5)
    assert 0 < manifest.memory_free <= manifest.memory_total <= memory.host_memory()[0] // 2
    assert manifest.details["mlx"] == mx.__version__ and "50%" in manifest.details["memory budget"]
    made.close()
    with pytest.raises(RuntimeError, match="closed"):
        made.alloc(SPEC, 2)


def test_a_step_returns_before_it_is_built_and_errors_wait_for_collect(platform):
    gate, order = threading.Event(), []

    def forward(ops: Any, weights: Any, batch: Batch) -> Any:
        assert gate.wait(120)
        order.append(len(order))
        if len(order) == 2:
            raise ValueError("step 1 fails")
        return ops.embed(batch.tokens, weights)

    step, state, outs = platform.compile(forward, table(platform), None), platform.alloc(SPEC, 2), []
    for _ in range(3):
        out, state = step(state, token_batch(2, np.zeros(2)))
        outs.append(out)
    assert order == []
    gate.set()
    assert outs[0].collect().shape == (2, 64)
    with pytest.raises(ValueError, match="step 1 fails"):
        outs[1].collect()
    assert outs[2].collect().shape == (2, 64)


def attend(ops: Any, weights: Any, batch: Batch) -> Any:
    x = ops.embed(batch.tokens, weights).reshape(-1, 2, 32)
    return ops.sample(ops.attention(x, x, x, 0, AttentionSpec(0.2)).reshape(-1, 64)[batch.logit_rows])


def some_penalties(count: int) -> Penalties:
    """`count` entries of row 0."""
    zeros, ones = np.zeros(count, np.int32), np.ones(2, np.float32)
    return Penalties(zeros, np.arange(count, dtype=np.int32), zeros, zeros[:2], ones * 1.5, ones, ones)


def test_one_trace_for_each_bucket_whatever_is_sampled(platform):
    traced = []

    def forward(ops: Any, weights: Any, batch: Batch) -> Any:
        traced.append(batch.tokens.shape)
        return attend(ops, weights, batch)

    step = platform.compile(forward, table(platform), Bucket(2, 2, 4, 2))
    state = platform.alloc(SPEC, 4)
    wishes = [Sampling(), Sampling(np.ones(2, np.float32), np.zeros(2, np.float32)),
              *(Sampling(penalties=some_penalties(count)) for count in (2, 3, 17)),
              Sampling(bias=Bias(np.zeros(5, np.int32), np.arange(5, dtype=np.int32), np.ones(5, np.float32))),
              Sampling(top_logprobs=np.zeros(3, np.int32))]
    for position, sampling in enumerate(wishes):
        batch = token_batch(2, np.full(2, position), sampling=sampling, targets=np.full(2, -1))
        out, state = step(state, batch)
        assert ((0 <= out.collect().tokens) & (out.collect().tokens < 64)).all()
    assert traced == [(2,)]


def test_k_and_v_are_written_in_place(platform):
    """Launches that overlap must not copy the memory: 64 MiB here, of which a step writes 1 KiB."""
    spec, pages = StateSpec((LayerState(2, 32),), "f32", 16, 8), 1 << 13
    state = platform.alloc(spec, pages)
    size = pages * spec.page_bytes()
    step, outs = platform.compile(attend, table(platform), Bucket(2, 2, 4, 2)), []
    held = mx.get_active_memory()
    assert size == 64 << 20 <= held
    mx.reset_peak_memory()
    for position in range(6):
        out, state = step(state, token_batch(2, np.full(2, position), targets=np.full(2, -1)))
        outs.append(out)
    for out in outs:
        out.collect()
    assert mx.get_peak_memory() - held < size // 4


def test_pages_of_the_wrong_size_are_refused(platform):
    state = platform.alloc(SPEC, 4)
    data = platform.export_pages(state, [1, 3])
    assert len(data) == 2 * SPEC.page_bytes()
    with pytest.raises(ValueError, match=f"3 pages take {3 * SPEC.page_bytes()} bytes, not {len(data)}"):
        platform.import_pages(state, [1, 2, 3], data)


def test_unknown_formats_and_dtypes_are_named(platform):
    raw, _ = quantized(np.random.default_rng(0), "f32", (16, 32))
    with pytest.raises(Unsupported, match="f64"):
        platform.load([raw], WeightSpec(("w",), "linear"), "f64")
    with pytest.raises(Unsupported, match="w: format iq1_s is unknown"):
        platform.load([raw._replace(dtype="iq1_s")], WeightSpec(("w",), "linear"), "f32")
    with pytest.raises(Unsupported, match="f64"):
        platform.alloc(StateSpec(SPEC.layers, "f64", 16, 4), 2)
    assert "iq1_s" in platform.supports("linear", format="iq1_s", dtype="bf16")
    assert platform.supports("linear", format="q4_1", dtype="bf16") is None
    assert "telepathy" in platform.supports("telepathy")


def test_it_needs_no_torch_and_ends_cleanly_with_graphs_open():
    """The interpreter ends while compiled graphs exist; they must be gone before Python is."""
    code = """
import sys
from tests.test_mlx_platform import *
made = Platform({})
made.probe()
step, state = made.compile(attend, table(made), Bucket(2, 2, 4, 2)), made.alloc(SPEC, 4)
out, state = step(state, token_batch(2, np.zeros(2), targets=np.full(2, -1)))
out.collect()
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout.split()) == (0, ["False"]), done.stderr


# Weights.

@pytest.mark.parametrize("name", quant.KEPT)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_repacked_codes_are_the_same_numbers(name, dtype):
    raw, _ = quantized(np.random.default_rng(1), name, (8, 256))
    leaf = quant.load_weight([raw], WeightSpec(("w",), "embed"), dtype, HOST)
    assert isinstance(leaf, quant.Affine) and leaf.scales.dtype == mx.float32
    exact = quant.Affine(leaf.packed, leaf.scales, leaf.biases, leaf.group, leaf.bits, mx.float32)
    np.testing.assert_array_equal(np.array(exact.rows(mx.arange(8))), expand(raw))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_are_packed_as_mlx_packs_them(bits):
    values = mx.random.normal((4, 64))
    words, scales, biases = mx.quantize(values, group_size=32, bits=bits)
    grouped = mx.dequantize(words, scales, biases, group_size=32, bits=bits).reshape(4, 2, 32)
    codes = np.array(mx.round((grouped - biases[..., None]) / scales[..., None])).astype(np.uint8).reshape(4, 64)
    np.testing.assert_array_equal(quant.pack(codes, bits), np.array(words))


@pytest.mark.parametrize("names,kept", [(("q4_1", "q4_0", "q4_k"), "int4 groups of 32"), (("q4_1", "q8_0"), "f32"),
                                        (("affine4_64", "affine4_64"), "int4 groups of 64"),
                                        (("affine4_64", "affine4_32"), "f32"),
                                        (("awq4", "awq4"), "int4 groups of 32"), (("int8",) * 2, "int8 groups of 128"),
                                        (("gptq4_act",), "f32")])
def test_stacked_parts_are_kept_when_one_kernel_can_serve_them(names, kept):
    rng = np.random.default_rng(2)
    raws = [quantized(rng, name, (16, 256))[0] for name in names]
    leaf = quant.load_weight(raws, WeightSpec(names, "linear"), "f32", HOST)
    assert str(leaf) == kept
    x = rng.normal(size=(3, 256)).astype(np.float32)
    want = x @ np.concatenate([expand(raw) for raw in raws]).T
    np.testing.assert_allclose(np.array(leaf.product(mx.array(x))), want, atol=2e-4 * np.abs(want).max())


@pytest.mark.parametrize("role", ["linear", "embed"])
@pytest.mark.parametrize("name,dtype", [("f32", "f32"), ("bf16", "bf16"), ("q4_1", "bf16"), ("affine8_64", "f32")])
def test_shares_of_a_product_join_in_order(monkeypatch, name, dtype, role):
    """Three streams, and outputs that do not divide by three."""
    raw, values = quantized(np.random.default_rng(7), name, (50, 64))
    results = []
    for threads in ("1", "3"):
        monkeypatch.setattr(quant, "SHARED", 1)
        made = Platform({"threads": threads})
        made.probe()
        weights = (table(made), made.load([raw], WeightSpec(("w",), role), dtype))
        assert isinstance(weights[1], quant.Shared) == (threads == "3")
        step = made.compile(lambda ops, w, batch: ops.linear(ops.embed(batch.tokens, w[0]), w[1]), weights,
                            Bucket(4, 4, 4, 4))
        results.append(step(made.alloc(SPEC, 8), token_batch(4, np.zeros(4)))[0].collect())
        made.close()
    assert np.array_equal(*results)
    x = quantized(np.random.default_rng(0), "f32", (8, 64))[1][:4]
    assert np.abs(results[0] - x @ values.T).max() < 0.02 * np.abs(x @ values.T).max()


def test_on_an_apple_gpu_scales_stay_as_narrow_as_they_are():
    """The dtype of the input, so that no step converts them; float32 where that would round or overflow."""
    load = partial(quant.load_weight, spec=WeightSpec(("w",), "linear"), device=quant.Device(metal=True))
    raw, _ = quantized(np.random.default_rng(3), "q8_0", (4, 64))
    assert load([raw], dtype="f16").scales.dtype == mx.float16
    assert load([raw], dtype="bf16").scales.dtype == mx.float32
    blocks = np.array(raw.data).reshape(-1, 34)
    blocks[:, :2] = np.array([1000], "<f2").view(np.uint8)  # -128 of it is beyond float16
    assert load([raw._replace(data=blocks.reshape(-1))], dtype="f16").scales.dtype == mx.float32


# Rotation and attention.

def test_angles_are_right_far_out():
    spec = RopeSpec(tuple(10000.0 ** (-i / 32) for i in range(32)), 1.25)
    positions = np.array([0, 1, 4095, 4096, 131071, 10 ** 7])
    angles = positions[:, None] * np.array(spec.inv_freq)
    cos, sin = (np.array(part)[:, 0] for part in Turns().at(mx.array(positions.astype(np.int32)), spec))
    np.testing.assert_allclose(cos, 1.25 * np.cos(angles), atol=4e-7)
    np.testing.assert_allclose(sin, 1.25 * np.sin(angles), atol=4e-7)


def test_the_fused_rotation_turns_the_same_way():
    spec = RopeSpec(tuple(10000.0 ** (-i / 16) for i in range(16)), 1.5)
    x, positions = mx.random.normal((4, 2, 32)), mx.array([0, 3, 100, 2000])
    cos, sin = Turns().at(positions, spec)
    first, second = x[..., :16], x[..., 16:]
    want = mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    got = mx.fast.rope(x[:, :, None], 32, traditional=False, base=None, scale=1.0, offset=positions,
                       freqs=Turns().periods(spec))[:, :, 0] * spec.scale
    np.testing.assert_allclose(np.array(got), np.array(want), atol=2e-3)


KERNEL_CASES = [(AttentionSpec(0.3), "float", 1e-5), (AttentionSpec(0.3, window=6), "float", 1e-5),
                (AttentionSpec(0.3, softcap=1.5), "float", 1e-5), (AttentionSpec(0.3, 3, 2.0), "_Float16", 2e-3)]


@pytest.mark.parametrize("spec,kind,error", KERNEL_CASES)
def test_the_metal_kernel_attends_as_the_gathered_path_does(tmp_path, spec, kind, error):
    """Its source, with every thread of a threadgroup a thread; K and V that no row owns are NaN."""
    rng = np.random.default_rng(4)
    q = rng.normal(size=(3, 4, 64)).astype(np.float16).astype(np.float32)
    cache = rng.normal(size=(4, 7 * 4, 64)).astype(np.float16).astype(np.float32)
    pages, positions = np.array([[2, 5, 1], [6, 0, 0], [0, 0, 0]], np.int32), np.array([10, 2, -1], np.int32)
    for slots in (slice(0, 4), slice(1 * 4 + 3, 5 * 4), slice(6 * 4 + 3, 28)):
        owned = np.zeros(28, bool)
        owned[2 * 4:3 * 4] = True
        cache[:, [slot for slot in range(28)[slots] if not owned[slot]]] = np.nan
    want = attention.attend_gathered(mx.array(q)[:, None], mx.array(cache), spec, mx.array(pages),
                                     mx.array(positions)[:, None], 4, HOST)[:, 0]
    got = run_decode_kernel(tmp_path, q, cache, pages, positions, spec, 4, kind)
    assert np.isfinite(got).all() and not got[2].any()
    np.testing.assert_allclose(got, np.array(want), atol=error)


# Sampling.

def test_sums_over_a_large_vocabulary_keep_their_digits():
    weights = np.random.default_rng(5).exponential(size=(2, 152_000)).astype(np.float32)
    weights[1, 1000:] *= 1e-3
    exact = np.cumsum(weights, axis=1, dtype=np.float64)
    error = np.abs(np.array(cumulative(mx.array(weights))) - exact).max(axis=1) / exact[:, -1]
    assert (error < 1e-6).all(), error


def by_hand(logits: np.ndarray, sampling: Sampling, row: int) -> int:
    """One draw over a full sort, in float64."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    weights = np.exp((logits - logits.max()) / sampling.temperature[row])
    kept = order[:sampling.top_k[row]] if sampling.top_k[row] else order
    sums = np.cumsum(weights[kept])
    kept = np.sort(kept[:1 + np.searchsorted(sums, sampling.top_p[row] * sums[-1])])
    sums = np.cumsum(weights[kept])
    return int(kept[np.searchsorted(sums, sampling.uniform[row] * sums[-1], side="right")])


def test_cuts_that_fall_among_equals_keep_the_lowest_ids():
    size, rng = 1024, np.random.default_rng(6)
    logits = rng.normal(size=(6, size)).astype(np.float32)
    logits[1] *= 1e-3                                # nearly flat: top-p keeps most of the vocabulary
    logits[2:4] = rng.integers(0, 2, (2, size))      # half of all tie for the best
    values = Sampling(np.ones(6, np.float32), rng.random(6, np.float32), np.array([5, 0, 7, 265, 768, 0], np.int32),
                      np.array([1, 0.8, 1, 0.9, 1, 0.3], np.float32))
    got = sample(mx.array(logits), np.full(6, -1, np.int32), values, mx.zeros(6, mx.int32)).result().tokens
    assert got.tolist() == [by_hand(row.astype(np.float64), values, i) for i, row in enumerate(logits)]


def test_a_fully_banned_row_gives_its_lowest_id_not_an_error():
    logits = mx.full((2, 40), -mx.inf)
    for top_k in (None, np.array([3, 0], np.int32)):
        values = Sampling(np.ones(2, np.float32), np.full(2, 0.9, np.float32), top_k)
        got = sample(logits, np.full(2, -1, np.int32), values, mx.zeros(2, mx.int32)).result().tokens
        assert got.tolist() == [0, 0]


# Memory.

def test_figures_follow_what_is_held():
    budget = memory.Budget(0.5, metal=False)
    before = budget.figures()
    held = mx.zeros(16 << 20, mx.float32)
    mx.eval(held)
    total, free = budget.figures()
    assert total == before[0] and free <= before[1] - held.nbytes // 2


def test_cached_buffers_are_given_back_when_the_system_is_short(monkeypatch):
    budget = memory.Budget(0.5, metal=False)
    total = budget.total
    mx.eval(mx.zeros(4 << 20, mx.float32))
    assert mx.get_cache_memory() >= 16 << 20
    budget.relieve()
    assert mx.get_cache_memory() and not budget.times, "nothing is short"
    monkeypatch.setattr(memory, "host_memory", lambda: (total, total // 20))
    budget.relieve()
    assert not budget.times, "it looks once a second"
    budget._next_look = 0.0
    limit = budget.cache_limit
    budget.relieve()
    assert mx.get_cache_memory() == 0 and budget.cache_limit == limit // 2
    assert budget.given_back >= 16 << 20 and "MiB of buffers in 1 times" in budget.details["given back"]


def test_a_smaller_state_takes_less_memory_than_the_larger_one_that_was_given_up(platform):
    larger = platform.alloc(SPEC, 4000)
    before = mx.get_active_memory() + mx.get_cache_memory()
    del larger
    smaller = platform.alloc(SPEC, 2000)
    freed = before - mx.get_active_memory() - mx.get_cache_memory()
    assert freed >= 0.9 * 2000 * SPEC.page_bytes() and smaller.caches


@pytest.mark.parametrize("name", ["q4_1", "q8_0", "affine4_64"])
def test_many_tokens_multiply_expanded_values(name):
    raw, values = quantized(np.random.default_rng(1), name, (48, 256))
    leaf = quant.load_weight([raw], WeightSpec(("w",), "linear"), "f32", HOST)
    x = np.random.default_rng(2).normal(size=(quant.MANY, 256)).astype(np.float32)
    for count in (quant.MANY - 1, quant.MANY):
        got = np.array(leaf.product(mx.array(x[:count])))
        assert np.abs(got - x[:count] @ values.T).max() < 1e-3 * np.abs(values).max() * 16
