"""What the tpu platform promises beyond its ops: kernels equal to their composed paths, one trace for each bucket,
memory that is given and given back, ranks in one program, sampling over a large vocabulary, programs for real chips."""
from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # read when jax starts

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="the tpu platform needs jax")

import jax.numpy as jnp  # noqa: E402
from isthmus.conformance import tiny  # noqa: E402
from isthmus.conformance.driver import Driver, Model  # noqa: E402
from isthmus.conformance.formats import quantized  # noqa: E402
from isthmus.conformance.law_ops import op_cases  # noqa: E402
from isthmus.conformance.opcase import token_batch  # noqa: E402
from isthmus.conformance.ops_run import check_case  # noqa: E402
from isthmus.core.discovery import load_platform  # noqa: E402
from isthmus.core.plan import Batch, Bias, Penalties, Sampling  # noqa: E402
from isthmus.core.platform import (  # noqa: E402
    AttentionSpec,
    LayerState,
    StateSpec,
    Unavailable,
    Unsupported,
    WeightSpec,
)
from isthmus.platforms.tpu import attention_kernel, matmul_kernel, quant, sampling  # noqa: E402
from isthmus.platforms.tpu.graph import pack, pack_sampling, unpack  # noqa: E402
from isthmus.platforms.tpu.platform import Platform  # noqa: E402

COST = 60  # seconds
# Ten seconds each: every shape of the kernels once. All attention cases of float32 passed by hand too.
INTERPRETED = {f"{op}[{case},{dtype}]" for op, case, dtype in [
    ("attention", "gqa,6/2x32,page4", "f32"), ("attention", "gqa,6/2x32,page16", "bf16"),
    ("attention", "window7,softcap,4/2x32,page1", "f32"), ("attention", "window7,4/2x32,page16", "bf16"),
    ("attention", "softcap,4/2x32,page16", "f32"), ("attention", "wide_head,4/1x256,page16", "f32"),
    ("attention", "page0_nan,4/2x32,page16", "f32"), ("attention", "padding_rows,4/2x32,page16", "f32"),
    ("attention", "large_scores,4/2x32,page16", "bf16"), ("moe", "softmax", "f32"), ("moe", "ties,sigmoid", "f32"),
    ("moe", "softmax,q4_1", "bf16"), ("moe", "softmax,affine8_64", "f32"), ("moe", "apart,q8_0", "f32"),
    ("linear", "q4_1,T5", "bf16"), ("linear", "q8_0,T33", "f32"), ("linear", "affine4_64,T5", "f32")]}
SPEC = StateSpec((LayerState(2, 32), LayerState(1, 64)), "f32", 16, 8)
HOST = {"backend": "cpu", "compile_cache": "off"}


@cache
def platform(kernels: str = "auto") -> Platform:
    made = Platform(HOST | {"kernels": kernels})
    made.probe()
    return made


def random_logits(ops: Any, weights: Any, batch: Batch) -> Any:
    return ops.sample(ops.embed(batch.tokens, weights)[batch.logit_rows])


def table(rows: int, width: int, seed: int = 0) -> Any:
    raw, _ = quantized(np.random.default_rng(seed), "f32", (rows, width))
    return platform().load([raw], WeightSpec(("w",), "embed"), "f32")


# Life cycle.

def test_options_and_ranks_are_refused_with_the_way_out():
    with pytest.raises(Unavailable, match="no option kernel; did you mean kernels"):
        Platform({"kernel": "composed"}).probe()
    with pytest.raises(Unavailable, match="kernels='fast': one of auto, mosaic"):
        Platform({"kernels": "fast"}).probe()
    with pytest.raises(Unavailable, match="rank 1 was asked for"):
        Platform(HOST).probe(rank=1, world=2)
    with pytest.raises(Unavailable, match="99 ranks need 99 cpu devices, jax finds .*XLA_FLAGS="):
        Platform(HOST).probe(world=99)
    with pytest.raises(Unavailable, match="probe"):
        Platform(HOST).compile(lambda ops, weights, batch: None, {}, None)


def test_manifest_says_what_runs_here():
    manifest = Platform(HOST).probe()
    assert (manifest.rank, manifest.local_ranks, manifest.formats) == (5, 1, ())
    assert manifest.details["backend"] == "cpu" and manifest.details["kernels"] == "composed"
    assert manifest.details["jax"] == jax.__version__
    assert 0 < manifest.memory_free <= manifest.memory_total
    two = Platform(HOST | {"kernels": "interpret"}).probe(0, 2)
    assert two.local_ranks == 2 and two.device.startswith("2 x ") and "q4_1" in two.formats
    assert two.memory_total <= manifest.memory_total // 2 + 1


def test_unknown_formats_dtypes_and_cuts_are_named():
    raw, _ = quantized(np.random.default_rng(0), "f32", (16, 32))
    with pytest.raises(Unsupported, match="f64"):
        platform().load([raw], WeightSpec(("w",), "linear"), "f64")
    with pytest.raises(Unsupported, match="w: format iq1_s is unknown"):
        platform().load([raw._replace(dtype="iq1_s")], WeightSpec(("w",), "linear"), "f32")
    with pytest.raises(Unsupported, match="f16"):
        platform().alloc(StateSpec(SPEC.layers, "f16", 16, 4), 2)
    three = Platform(HOST)
    three.probe(0, 3)
    with pytest.raises(Unsupported, match=r"shape \(16, 32\) cannot be cut into 3 along axis 0"):
        three.load([raw], WeightSpec(("w",), "linear", cut=0), "f32")
    assert "iq1_s" in platform().supports("linear", format="iq1_s", dtype="bf16")
    assert "expand" in platform().supports("linear", format="q4_1", dtype="f32")
    assert platform("composed").supports("linear", format="q4_1", dtype="f32") is None


def test_pages_of_the_wrong_size_are_refused():
    state = platform().alloc(SPEC, 4)
    data = platform().export_pages(state, [1, 3, 2])
    assert len(data) == 3 * SPEC.page_bytes()
    with pytest.raises(ValueError, match=f"2 pages take {2 * SPEC.page_bytes()} bytes, not {len(data)}"):
        platform().import_pages(state, [1, 2], data)
    assert platform().export_pages(state, []) == b""


# Steps.

def test_a_step_keeps_the_memory_of_k_and_v_where_it_is():
    def forward(ops: Any, weights: Any, batch: Batch) -> Any:
        x = ops.embed(batch.tokens, weights).reshape(-1, 2, 32)
        return ops.attention(x, x, x, 0, AttentionSpec(1.0))

    spec = StateSpec((LayerState(2, 32),), "f32", 16, 8)
    step, state = platform().compile(forward, table(8, 64), None), platform().alloc(spec, 5)
    address = state.layers[0].unsafe_buffer_pointer()
    for _ in range(3):
        before = state
        out, state = step(state, token_batch(3))
        out.collect()
        assert before.layers[0].is_deleted() and state.layers[0].unsafe_buffer_pointer() == address
    assert np.asarray(state.layers[0])[1:4, 0].any()
    copied = platform().copy_pages(state, [2], [4])
    assert copied.layers[0].unsafe_buffer_pointer() == address


def test_one_trace_for_each_bucket_whatever_the_sampling():
    """Penalties of any length, bans, draws, logprobs: the model's program stays the one that was traced."""
    step, state = platform().compile(random_logits, table(8, 40), None), platform().alloc(SPEC, 10)
    ones = np.ones(4, np.float32)
    for entries in (1, 3, 7):
        ids = np.arange(entries, dtype=np.int32)
        penalties = Penalties(ids * 0, ids, ids, np.zeros(4, np.int32), ones, ones, ones)
        for values in (Sampling(), Sampling(penalties=penalties), Sampling(ones, ones / 2, top_p=ones / 2),
                       Sampling(bias=Bias(ids, ids, ids + 0.5), top_logprobs=np.zeros(entries, np.int32))):
            out, state = step(state, token_batch(4, sampling=values, targets=np.full(4, -1)))
            result = out.collect()
            assert result.tokens.shape == (4,)
            if values.top_logprobs is not None:
                assert result.top_ids.shape == (4, entries)
    assert step.traces == 1
    out, state = step(state, token_batch(5, targets=np.full(5, -1)))
    assert step.traces == 2 and out.collect().tokens.shape == (5,)


def test_launches_do_not_wait_and_a_failing_one_harms_no_other():
    """The second step cannot be traced; the third takes its input from what the first left in the State."""
    def forward(ops: Any, weights: Any, batch: Batch) -> Any:
        if batch.tokens.shape[0] == 3:
            raise ValueError("three tokens are one too many")
        return random_logits(ops, weights, batch)

    logits = np.full((40, 40), 0, np.float32)
    logits[np.arange(40), (np.arange(40) + 5) % 40] = 1
    raw = quantized(np.random.default_rng(0), "f32", (40, 40))[0]._replace(data=logits.view(np.uint8).reshape(-1))
    weights = platform().load([raw], WeightSpec(("w",), "embed"), "f32")
    step, state = platform().compile(forward, weights, None), platform().alloc(SPEC, 5)
    outs = []
    for tokens in ([0, 1], [0, 1, 2], [-1, -1]):
        batch = token_batch(len(tokens), targets=np.full(len(tokens), -1))
        out, state = step(state, batch._replace(tokens=np.array(tokens, np.int32)))
        outs.append(out)
    assert outs[0].collect().tokens.tolist() == [5, 6]
    with pytest.raises(ValueError, match="one too many"):
        outs[1].collect()
    assert outs[2].collect().tokens.tolist() == [10, 11]


def test_packed_arrays_come_back_bit_by_bit():
    rng = np.random.default_rng(0)
    arrays = {"a": rng.integers(-9, 9, (3, 2), np.int32), "b": rng.normal(size=5).astype(np.float32),
              "c": np.array([[0xffffffff, 1]], np.uint32), "none": np.zeros(0, np.int32)}
    back = unpack(jnp.asarray(pack(arrays)[0]), pack(arrays)[1])
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(back[name]), array)


# Kernels, interpreted.

KERNEL_CASES = ("moe[softmax,f32]", "moe[ties,sigmoid,f32]", "moe[softmax,q4_1,bf16]",
                "linear[q4_1+q4_1+q4_1,T3,bias,f32]", "linear[q8_0,T33,bf16]", "linear[q8_0+q8_0,T3,f32]")
COMPOSED_CASES = ("moe[softmax,q4_1,f32]", "linear[q4_0,T2,bias,f32]", "linear[q8_0,T1,bf16]")


@cache
def cases() -> dict[str, Any]:
    return {case.id: case for case in op_cases()}


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_kernels_compute_what_the_ops_say(name):
    check_case(platform("interpret"), cases()[name])


@pytest.mark.parametrize("name", COMPOSED_CASES)
def test_codes_that_are_kept_without_a_kernel(name):
    check_case(platform("composed"), cases()[name])


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in op_cases() if c.id in INTERPRETED], ids=str)
def test_every_case_on_the_interpreted_kernels(case):
    check_case(platform("interpret"), case)


def ragged(counts: list[int], contexts: list[int], page: int, pages: int, padding: int) -> Batch:
    """Rows with `counts` new tokens at the end of `contexts`, on shuffled pages, then padding tokens and a row."""
    order = np.random.default_rng(0).permutation(np.arange(1, pages))
    starts = np.concatenate([[0], np.cumsum(counts), [sum(counts)]]).astype(np.int32)
    tables, used = np.zeros((len(counts) + 1, 8), np.int32), 0
    for row, context in enumerate(contexts):
        need = -(-context // page)
        tables[row, :need], used = order[used:used + need], used + need
    rows = np.concatenate([np.repeat(np.arange(len(counts)), counts), np.full(padding, len(counts))]).astype(np.int32)
    positions = np.concatenate([np.arange(c - n, c) for n, c in zip(counts, contexts, strict=True)]
                               + [np.zeros(padding)]).astype(np.int32)
    return Batch(rows, positions, rows, rows, np.arange(len(counts) + 1, dtype=np.int32), starts,
                 np.array([*contexts, 0], np.int32), tables, None, None, Sampling())


@pytest.mark.parametrize("interpret", [True, pytest.param("params", marks=pytest.mark.slow)])
def test_the_attention_kernel_over_blocks_that_rows_share(interpret):
    """Decode rows beside prefill rows that begin and end inside query blocks, more pages than a buffer holds."""
    from jax.experimental.pallas import tpu as pltpu
    rng, page = np.random.default_rng(1), 16
    batch = jax.tree.map(jnp.asarray, ragged([1, 1, 5, 40, 25], [100, 1, 17, 128, 25], page, 40, 5))
    q = jnp.asarray(rng.normal(size=(77, 4, 32)), jnp.float32)
    cache = np.asarray(rng.normal(size=(40, page, 128)), np.float32)
    cache[0] = np.nan  # nobody's page is never read, and what lies after a row's last token does not count
    for row, length in enumerate([100, 1, 17, 128, 25]):
        cache[np.asarray(batch.pages)[row, (length - 1) // page], (length - 1) % page + 1:] = np.nan
    spec, cache = AttentionSpec(0.2, 50, 4.0), jnp.asarray(cache)
    how = pltpu.InterpretParams() if interpret == "params" else True
    items = attention_kernel.Items.of(batch)
    got = attention_kernel.ragged_attention(q, cache, batch, items, spec, how)
    assert items.size == 32 and int(items.count) == 7
    for row in range(5):
        start, stop, length = (int(x) for x in (batch.starts[row], batch.starts[row + 1], batch.lengths[row]))
        context = np.asarray(cache)[np.asarray(batch.pages)[row]].reshape(-1, 2, 2, 32)[:length].astype(np.float64)
        for token in range(start, stop):
            position = length - stop + token
            k, v = (context[max(0, position - 49):position + 1, part] for part in (0, 1))
            for head in range(4):
                scores = 4 * np.tanh(k[:, head // 2] @ np.asarray(q, np.float64)[token, head] * 0.2 / 4)
                shares = np.exp(scores - scores.max())
                expected = shares @ v[:, head // 2] / shares.sum()
                np.testing.assert_allclose(got[token, head], expected, atol=2e-5)


def test_the_matmul_kernel_over_several_blocks_of_inputs_and_outputs(monkeypatch):
    monkeypatch.setattr(matmul_kernel, "WHOLE", 128)
    monkeypatch.setattr(matmul_kernel, "INPUTS", 128)
    monkeypatch.setattr(matmul_kernel, "OUTPUTS", 128)
    rng = np.random.default_rng(2)
    raw, values = quantized(rng, "q4_1", (3, 200, 384))
    leaf = quant.load_weight([raw], WeightSpec(("w",), "experts", experts=3), "f32", platform()._ready())
    assert (leaf.bits, leaf.group, leaf.shape) == (4, 32, (3, 384, 200))
    x, experts = rng.normal(size=(32, 384)), np.array([2, 0, 1, 1], np.int32)
    got = matmul_kernel.grouped_matmul(jnp.asarray(x, jnp.float32), leaf, jnp.asarray(experts), 3, True)
    for tile in range(3):
        part = slice(8 * tile, 8 * tile + 8)
        np.testing.assert_allclose(got[part], x[part] @ values[experts[tile]].T, atol=1e-4)


@pytest.mark.parametrize("name,bits", [("q4_0", 4), ("q4_1", 4), ("q5_0", 8), ("q5_1", 8), ("q8_0", 8)])
def test_kept_codes_are_exact(name, bits):
    """In float32 the leaf's values are the checkpoint's; an odd number of groups is kept one code to a byte."""
    mesh = platform()._ready()
    for width, expected in ((128, bits), (96, 8)):
        raw, values = quantized(np.random.default_rng(3), name, (24, width))
        leaf = quant.load_weight([raw], WeightSpec(("w",), "linear"), "f32", mesh)
        assert leaf.bits == expected and str(leaf) == f"int{expected} groups of 32"
        np.testing.assert_allclose(leaf.expanded(jnp.float32)[0], values.T, atol=1e-6)


def test_refusals_name_the_number():
    bf16 = jnp.dtype("bfloat16")
    assert attention_kernel.refusal(8, 128, 32, bf16) is None
    assert attention_kernel.refusal(3, 64, 16, bf16) is None
    assert "pages of 8 tokens" in attention_kernel.refusal(8, 128, 8, bf16)
    assert "head_dim 80" in attention_kernel.refusal(8, 80, 32, bf16)
    big = quant.Experts(jax.ShapeDtypeStruct((1, 5000, 256), bf16))
    assert "5000 inputs" in matmul_kernel.refusal(big)
    assert matmul_kernel.refusal(quant.Experts(jax.ShapeDtypeStruct((8, 14336, 4096), bf16))) is None


# Sampling over a large vocabulary.

def drawn_by_hand(logits: np.ndarray, values: Sampling, row: int) -> int:
    """One draw over a full sort, in float64."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    weights = np.exp((logits - logits.max()) / values.temperature[row])
    kept = order[:values.top_k[row]] if values.top_k[row] else order
    cumulative = np.cumsum(weights[kept])
    kept = np.sort(kept[:1 + np.searchsorted(cumulative, values.top_p[row] * cumulative[-1])])
    kept = kept[weights[kept] >= values.min_p[row]]
    cumulative = np.cumsum(weights[kept])
    return int(kept[np.searchsorted(cumulative, values.uniform[row] * cumulative[-1], side="right")])


def run_sampler(logits: np.ndarray, values: Sampling) -> np.ndarray:
    batch = token_batch(len(logits), sampling=values, targets=np.full(len(logits), -1))
    given = unpack(*(jnp.asarray(part) if isinstance(part, np.ndarray) else part for part in pack_sampling(batch)))
    return np.asarray(jax.jit(sampling.sample)(jnp.asarray(logits), jnp.zeros(20, jnp.int32), given)[0]["tokens"])


def test_cuts_with_ties_at_the_border_keep_the_lower_ids():
    rng, vocabulary = np.random.default_rng(4), 1000
    logits = rng.normal(size=(8, vocabulary)).astype(np.float32)
    logits[1] *= 1e-3                                  # nearly flat: top-p keeps most
    logits[2:5] = rng.integers(0, 2, (3, vocabulary))  # half of all tie for the best
    logits[5] = rng.integers(-1, 1, vocabulary) * np.float32(0.0)  # zeros of both signs are equal
    values = Sampling(np.ones(8, np.float32), rng.random(8, np.float32),
                      np.array([5, 0, 7, 300, 0, 3, 1, 999], np.int32),
                      np.array([1, 0.8, 1, 0.9, 0.3, 1, 1, 0.999], np.float32),
                      np.array([0, 0, 0, 0, 0, 0, 0, 0.01], np.float32))
    assert run_sampler(logits, values).tolist() == [drawn_by_hand(row.astype(np.float64), values, i)
                                                    for i, row in enumerate(logits)]


def test_a_draw_from_150000_flat_logits_is_the_one_of_float64():
    """Each token has 1 / 150,000 of the mass: a running sum in float32 would be off by hundreds of tokens."""
    rng, vocabulary = np.random.default_rng(5), 150_000
    logits = np.repeat((rng.normal(size=(1, vocabulary)) * 0.1).astype(np.float32), 16, 0)
    weights = np.exp(logits[0].astype(np.float64) - logits[0].max())
    uniform = ((np.arange(16) + 0.5) / 16).astype(np.float32)
    got = run_sampler(logits, Sampling(np.ones(16, np.float32), uniform))
    expected = np.searchsorted(np.cumsum(weights), uniform * weights.sum(), side="right")
    assert np.abs(got - expected).max() <= 1, np.abs(got - expected)


def test_a_banned_token_is_never_drawn_and_a_fully_banned_row_gives_its_lowest_id():
    logits = np.zeros((10, 600), np.float32)
    logits[:9, ::2] = -np.inf
    logits[9] = -np.inf
    uniform = np.array([0, 0.1, 0.5, 0.9, 0.999, 1 - 2**-24, 2**-30, 0.333, 0.667, 0.5], np.float32)
    got = run_sampler(logits, Sampling(np.ones(10, np.float32), uniform))
    assert (got[:9] % 2 == 1).all() and got[9] == 0


# Ranks.

def eight_heads(monkeypatch: Any) -> Path:
    monkeypatch.setitem(tiny.KINDS, "eight", {"model_type": "llama", "num_attention_heads": 16,
                                              "num_key_value_heads": 8, "head_dim": 16})
    return tiny.tiny_model("eight", 0)


def greedy(name: str, options: dict[str, str], path: Path, world: int, dtype: str = "f32") -> np.ndarray:
    made = load_platform(name, options)
    manifest = made.probe(0, world)
    driver = Driver(Model(made, manifest, path, dtype, 16))
    prompts = [[5, 9, 77, 3], [8, 1, 30, 6, 6, 90, 12, 4, 64, 100]]
    return driver.greedy(prompts, 6)


def test_two_four_and_eight_ranks_give_the_tokens_of_one_and_of_the_reference(monkeypatch):
    path = eight_heads(monkeypatch)
    expected = greedy("reference", {}, path, 1, "f64")
    for world in (1, 2, 4, 8):
        if len(jax.devices("cpu")) < world:
            pytest.skip(f"{world} ranks need as many devices: jax started with {len(jax.devices('cpu'))}")
        np.testing.assert_array_equal(greedy("tpu", HOST, path, world), expected)


def test_ranks_share_stacked_parts_biases_and_groups():
    """Each part is cut by itself; a bias of a weight that is cut along its inputs is added once."""
    two = Platform(HOST | {"kernels": "composed"})
    two.probe(0, 2)
    rng = np.random.default_rng(6)
    parts = [quantized(rng, "q4_1", (shape, 128)) for shape in (32, 16)]
    down, dense_down = quantized(rng, "q8_0", (64, 48 * 4))
    bias, dense_bias = quantized(rng, "f32", (64,))
    x, dense_x = quantized(rng, "f32", (5, 128))
    weights = {"up": two.load([raw for raw, _ in parts], WeightSpec(("a", "b"), "linear", 0), "f32"),
               "down": two.load([down], WeightSpec(("d",), "linear", 1), "f32"),
               "bias": two.load([bias], WeightSpec(("c",), "bias", 1), "f32"),
               "x": two.load([x], WeightSpec(("x",), "embed"), "f32")}
    assert weights["up"].bits == 4 and weights["down"].bits == 8  # three groups a rank: no pairs

    def forward(ops: Any, w: Any, batch: Batch) -> Any:
        y = ops.linear(ops.embed(batch.tokens, w["x"]), w["up"])
        assert y.shape == (5, 24)
        a, b = y[:, :16], y[:, 16:]
        wide = jnp.concatenate([a, b] * 4, 1)  # any 96 inputs that differ by rank
        return ops.all_reduce(ops.linear(wide, w["down"], w["bias"]))

    got = two.compile(forward, weights, None)(two.alloc(SPEC, 7), token_batch(5))[0].collect()
    expected = np.tile(dense_bias, (5, 1))
    for rank in range(2):
        a, b = (dense_x @ np.split(values, 2)[rank].T for _, values in parts)
        expected += np.concatenate([a, b] * 4, 1) @ np.split(dense_down, 2, 1)[rank].T
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)


# Programs for chips that are not here.

@pytest.fixture
def tpu_aot() -> Any:
    """The script of `ci/`, as a module."""
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu: pip install 'jax[tpu]' flatbuffers")
    path = Path(__file__).resolve().parent.parent / "ci" / "tpu_aot.py"
    spec = importlib.util.spec_from_file_location("tpu_aot", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("format", ["bf16", "q4_1"])
@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_steps_compile_for_a_real_chip(tpu_aot, topology, world, format):
    model = tpu_aot.load_shapes(format, world, tpu_aot.CONFIG | {"num_hidden_layers": 2})
    for _, bucket in tpu_aot.steps():
        memory = tpu_aot.compile_model(model, bucket, topology, world)
        attention, products = 2, 2 * 4 * (format == "q4_1")
        assert memory.kernels == attention + products
        assert memory.temporary < 2**30


@pytest.mark.slow
def test_a_block_that_overflows_vmem_is_caught(tpu_aot, monkeypatch):
    """Two buffers of 16 pages with 2048 tokens each are 64 MiB."""
    monkeypatch.setattr(attention_kernel, "CONTEXT", 16 * 2048)
    monkeypatch.setattr(attention_kernel, "PAGES", 16)
    monkeypatch.setitem(tpu_aot.PAGE_SIZES, "tpu", (2048,))
    model = tpu_aot.load_shapes("bf16", 1, tpu_aot.CONFIG | {"num_hidden_layers": 1})
    _, bucket = next(tpu_aot.steps())
    with pytest.raises(Exception, match="(?i)vmem"):
        tpu_aot.compile_model(model, bucket, "v5e:2x2", 1)
