"""Sampling on the device's kernels against the reference platform, token by token."""
from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isthmus.core.platform import Bias, Mask, Penalties, Sampling
from isthmus.platforms.reference.sampling import best_ids, choose, log_softmax

from ..emulation.recorder import RecordedGraph
from .interpreter import prepare

DEVICE = prepare()
from isthmus.platforms.triton_kit.sampling import Sampled, Tiles, host_arrays, sample  # noqa: E402

COST = 15
SMALL = Tiles(block=16, capacity=8, warps=4)  # several blocks, and rows whose candidates do not fit
NARROW = Tiles(block=16, capacity=32, warps=4)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def run(logits: np.ndarray, sampling: Sampling, targets: np.ndarray | None = None, inputs: np.ndarray | None = None,
        dtype: torch.dtype = torch.float32, **more) -> Sampled:
    rows = len(logits)
    targets = np.full(rows, -1) if targets is None else targets
    arrays = {name: torch.from_numpy(np.array(values)).to(DEVICE)
              for name, values in host_arrays(sampling, rows).items()}
    inputs = np.zeros(rows) if inputs is None else inputs
    return sample(torch.from_numpy(logits).to(DEVICE, dtype), torch.from_numpy(targets).int().to(DEVICE), arrays,
                  inputs=torch.from_numpy(inputs).int().to(DEVICE),
                  top_logprobs=None if sampling.top_logprobs is None else len(sampling.top_logprobs), **more)


def reference(logits: np.ndarray, sampling: Sampling, inputs: np.ndarray | None = None) -> np.ndarray:
    rows = len(logits)
    return choose(logits.astype(np.float64), np.full(rows, -1), sampling, np.zeros(rows, int) if inputs is None
                  else inputs)


def moved(values: np.ndarray | None, by: float, most: float = 1 - 2 ** -24) -> np.ndarray | None:
    return None if values is None else np.where(values < 1, np.clip(values * (1 + by) + by, 0, most), values).astype(
        values.dtype)


def agree(got: torch.Tensor, logits: np.ndarray, sampling: Sampling, inputs: np.ndarray | None = None) -> None:
    """The reference's tokens; where float32 may decide otherwise, those of parameters moved by 2e-6."""
    tokens, want = got.cpu().numpy(), reference(logits, sampling, inputs)
    if np.array_equal(tokens, want):
        return
    near = [reference(logits, sampling._replace(uniform=moved(sampling.uniform, a), top_p=moved(sampling.top_p, b),
                                                min_p=moved(sampling.min_p, c)), inputs)
            for a, b, c in itertools.product((-2e-6, 0, 2e-6), repeat=3)]
    wrong = [row for row, token in enumerate(tokens) if token not in {n[row] for n in near}]
    assert not wrong, f"rows {wrong}: {tokens[wrong]}, the reference {want[wrong]}"


@st.composite
def batches(draw):
    """Logits in steps of 1/8, so that there are equals; each parameter on or off for the batch and in each row."""
    rows, vocab = draw(st.integers(1, 4)), draw(st.sampled_from([2, 15, 33, 70]))
    rng = np.random.default_rng(draw(st.integers(0, 2 ** 32)))
    logits = (np.round(rng.standard_normal((rows, vocab)) * draw(st.sampled_from([4, 16, 60]))) / 8).astype(np.float32)

    def some(values, off):
        return np.where(rng.random(rows) < 0.7, rng.choice(values, rows), off)

    def maybe(value):
        return value if draw(st.booleans()) else None

    count = int(rng.integers(0, 12))
    pairs = np.unique(np.stack([rng.integers(0, rows, count), rng.integers(0, vocab, count)]), axis=1).astype(np.int32)
    order = rng.permutation(pairs.shape[1])
    penalties = Penalties(pairs[0][order], pairs[1][order], rng.integers(0, 4, len(order)).astype(np.int32),
                          rng.integers(0, 2, rows).astype(np.int32), some([1.25, 2, 0.5], 1).astype(np.float32),
                          some([0.5, -1], 0).astype(np.float32), some([0.25, 1], 0).astype(np.float32))
    bias = Bias(rng.integers(0, rows, count).astype(np.int32), rng.integers(0, vocab, count).astype(np.int32),
                rng.choice([1, -2, 0.5, -np.inf], count).astype(np.float32))
    masked = np.flatnonzero(rng.random(rows) < 0.5).astype(np.int32)
    mask = Mask(masked, rng.integers(1, 2 ** 32, (len(masked), -(-vocab // 32)), dtype=np.uint32))
    sampling = Sampling(some([0.5, 1, 2], 0).astype(np.float32), rng.random(rows).astype(np.float32),
                        maybe(some([1, 2, 5, 20, 100], 0).astype(np.int32)),
                        maybe(some([0, 0.1, 0.5, 0.9, 0.999], 1).astype(np.float32)),
                        maybe(some([0.01, 0.2, 1], 0).astype(np.float32)), maybe(penalties), maybe(bias), maybe(mask))
    return logits, sampling, rng.integers(0, vocab, rows)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(batches(), st.sampled_from([SMALL, NARROW, Tiles(warps=4)]))
def test_tokens_are_the_reference_s(batch, tiles):
    logits, sampling, inputs = batch
    agree(run(logits, sampling, inputs=inputs, tiles=tiles).tokens, logits, sampling, inputs)


def test_draws_go_through_the_whole_distribution_in_the_order_of_ids():
    rows = 24
    logits = np.repeat(np.random.default_rng(3).standard_normal((1, 20)).astype(np.float32) / 2, rows, 0)
    uniform = ((np.arange(rows) + 0.5) / rows).astype(np.float32)
    for more in ({}, {"top_k": np.full(rows, 6, np.int32)}, {"min_p": np.full(rows, 0.1, np.float32)}):
        sampling = Sampling(np.full(rows, 0.8, np.float32), uniform, **more)
        got = run(logits, sampling, tiles=NARROW).tokens.cpu().numpy()
        assert np.array_equal(got, reference(logits, sampling)) and (np.diff(got) >= 0).all() and len(set(got)) > 4


@pytest.mark.parametrize("tiles", [SMALL, NARROW])
@pytest.mark.parametrize(("more", "kept"), [
    ({"top_k": 3}, 3), ({"top_p": 0.5}, 20), ({"top_p": 0.26}, 11), ({"top_p": 0.0}, 1),
    ({"top_k": 10, "top_p": 0.5}, 5), ({"top_k": 30, "min_p": 1.0}, 30), ({"top_k": 40}, 40), ({"top_k": 99}, 40)])
def test_of_equals_at_a_cut_the_lowest_ids_are_kept(tiles, more, kept):
    """40 equal logits, of which a cut keeps `kept`: the draw of u is number floor(u * kept)."""
    uniform = f32(0, 0.5, 0.51, 1 - 2 ** -24)
    kinds = {"top_k": np.int32}
    parameters = {name: np.full(4, value, kinds.get(name, np.float32)) for name, value in more.items()}
    got = run(np.full((4, 40), 2, np.float32), Sampling(np.ones(4, np.float32), uniform, **parameters), tiles=tiles)
    assert got.tokens.tolist() == [int(np.float64(u) * kept) for u in uniform]


def test_greedy_takes_the_lowest_id_among_equals():
    logits = np.zeros((5, 40), np.float32)
    logits[0, [7, 30]] = 3
    logits[1] = -0.0
    logits[1, 5] = 0.0
    logits[2] = -np.inf
    logits[3] = -5
    logits[3, 39] = -4
    logits[4, 3:] = [-1e-30] * 37
    for sampling in (Sampling(), Sampling(f32(0, 0, 1, 0, 0), f32(0.9, 0.9, 0.9, 0.9, 0.9))):
        assert run(logits, sampling, tiles=SMALL).tokens.tolist() == [7, 0, 0, 39, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_and_the_best_are_those_of_the_raw_logits(dtype):
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(np.round(rng.standard_normal((3, 50)) * 12) / 4).to(dtype).double().numpy()
    logits[2, 4:] = -np.inf  # four of six are all that is
    bias = Bias(np.zeros(1, np.int32), np.array([9], np.int32), f32(100))
    for cap in (None, 2.0):
        raw = logits if cap is None else cap * np.tanh(logits / cap)
        got = run(logits, Sampling(bias=bias, top_logprobs=np.zeros(6, np.int32)), np.array([-1, 8, -2]), dtype=dtype,
                  softcap=cap, tiles=SMALL)
        assert got.tokens.tolist() == [9, 8, 0]
        want = log_softmax(raw)
        np.testing.assert_allclose(got.logprobs.cpu(), want[np.arange(3), [9, 8, 0]], rtol=2e-6, atol=2e-6)
        ids = got.top_ids.cpu().numpy()
        if cap is None:  # under a cap, float32 makes equals of what float64 tells apart
            assert np.array_equal(ids, best_ids(raw, 6))
        np.testing.assert_allclose(got.top_logprobs.cpu(), np.take_along_axis(want, ids, 1), rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(got.top_logprobs.cpu(), -np.sort(-want, 1)[:, :6], rtol=2e-6, atol=2e-6)
    none = run(logits, Sampling(top_logprobs=np.zeros(0, np.int32)), dtype=dtype)
    assert none.top_ids.shape == (3, 0) and none.logprobs.shape == (3,)
    few = run(logits[:, :4], Sampling(top_logprobs=np.zeros(6, np.int32)), dtype=dtype)
    assert few.top_ids.shape == (3, 4)


def test_sampled_tokens_alone_are_kept_for_the_next_step():
    logits = np.zeros((4, 8), np.float32)
    logits[:, 5] = 1
    last = torch.full((6,), 77, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([3, 1, 0, 5], dtype=torch.int32, device=DEVICE)
    got = run(logits, Sampling(), np.array([-1, 2, -2, -1]), last=last, slots=slots)
    assert got.tokens.tolist() == [5, 2, 0, 5] and last.tolist() == [77, 77, 77, 5, 77, 5]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the recorder is for the CPU")
def test_nothing_in_it_waits_for_the_device():
    """Recorded, where reading a value on the host is an error, and replayed, with all that a row may ask for."""
    rng, two = np.random.default_rng(0), np.arange(2, dtype=np.int32)
    logits = torch.from_numpy(rng.standard_normal((2, 70)).astype(np.float32))
    sampling = Sampling(f32(0, 0.8), f32(0.1, 0.7), np.array([0, 30], np.int32), f32(1, 0.9), f32(0, 0.01),
                        Penalties(two, two, two, two, f32(1, 1.5), f32(0, 0.5), f32(0, 0.5)),
                        Bias(two, two, f32(1, -1)), Mask(two, np.full((2, 3), 2 ** 32 - 2, np.uint32)))
    arrays = {name: torch.from_numpy(np.array(values)) for name, values in host_arrays(sampling, 2).items()}
    targets, inputs, last = torch.full((2,), -1, dtype=torch.int32), torch.from_numpy(two), torch.zeros(2).int()
    graph = RecordedGraph()
    graph.capture_begin()
    try:
        got = sample(logits, targets, arrays, inputs=inputs, top_logprobs=3, last=last, slots=inputs)
    finally:
        graph.capture_end()
    agree(got.tokens, logits.numpy(), sampling, two)
    logits.copy_(logits.flip(1))
    graph.replay()
    agree(got.tokens, logits.numpy(), sampling, two)
    assert last.tolist() == got.tokens.tolist()


def test_every_bit_of_a_mask_is_its_token():
    allowed = [0, 1, 31, 32, 63, 64, 69]
    bits = np.zeros((len(allowed), 3), np.uint32)
    for row, token in enumerate(allowed):
        bits[row, token // 32] = 1 << (token % 32)
    bits[:, 2] |= np.uint32(1 << 31)  # beyond the vocabulary
    logits = np.random.default_rng(1).standard_normal((len(allowed) + 1, 70)).astype(np.float32)
    got = run(logits, Sampling(mask=Mask(np.arange(1, len(allowed) + 1, dtype=np.int32), bits)), tiles=SMALL)
    assert got.tokens.tolist() == [int(logits[0].argmax()), *allowed]


def test_a_pending_token_counts_once_more_whether_or_not_it_was_seen():
    logits = np.tile(f32(4, 3.9, 0, 0), (4, 1))
    penalties = Penalties(np.array([3, 1, 1], np.int32), np.array([1, 0, 2], np.int32), np.array([0, 0, 5], np.int32),
                          np.array([1, 1, 0, 0], np.int32), np.ones(4, np.float32), np.zeros(4, np.float32),
                          np.full(4, 0.3, np.float32))
    # Row 0: fresh; row 1: among the entries; row 2: nothing pending; row 3: in the prompt only, so no penalty.
    assert run(logits, Sampling(penalties=penalties)).tokens.tolist() == [1, 1, 0, 0]
    with pytest.raises(ValueError, match="inputs"):
        sample(torch.zeros(4, 4, device=DEVICE), torch.zeros(4, dtype=torch.int32, device=DEVICE),
               {n: torch.from_numpy(np.array(v)).to(DEVICE)
                for n, v in host_arrays(Sampling(penalties=penalties), 4).items()})


def test_no_number_in_one_row_is_told_there_and_nowhere_else():
    logits = np.tile(np.arange(20, dtype=np.float32), (3, 1))
    logits[1, 6] = np.nan
    for heat in (0.0, 1.0):
        sampling = Sampling(np.full(3, heat, np.float32), f32(0.5, 0.5, 0.5), np.full(3, 4, np.int32),
                            np.full(3, 0.9, np.float32), top_logprobs=np.zeros(2, np.int32))
        got = run(logits, sampling, tiles=SMALL)
        assert 0 <= got.tokens[1] < 20 and torch.isnan(got.logprobs[1])
        assert torch.isfinite(got.logprobs[[0, 2]]).all() and got.tokens[0] == got.tokens[2] >= 16


@pytest.mark.parametrize(("spread", "more"), [(0.0, {}), (0.0, {"top_p": f32(0.5)}), (3.0, {"top_k": [64]}),
                                              (3.0, {"top_p": f32(0.9)})])
def test_the_largest_vocabulary_overflows_nothing(spread, more):
    vocab = 1 << 18
    logits = (np.random.default_rng(2).standard_normal((1, vocab)) * spread).astype(np.float32)
    sampling = Sampling(f32(1), f32(0.999), **{name: np.array(v, np.int32 if name == "top_k" else np.float32)
                                               for name, v in more.items()})
    agree(run(logits, sampling, tiles=Tiles(block=1 << 15, capacity=4096)).tokens, logits, sampling)
    with pytest.raises(ValueError, match="at most 262144"):
        run(np.zeros((1, vocab + 1), np.float32), sampling)


def test_host_arrays_add_up_repeated_biases_and_sort_rows():
    arrays = host_arrays(Sampling(bias=Bias(np.array([2, 0, 2, 2], np.int32), np.array([5, 1, 5, 3], np.int32),
                                            f32(1, 2, 3, 4))), 4)
    assert arrays["bias_offsets"].tolist() == [0, 1, 1, 3, 3]
    assert arrays["bias_ids"].tolist() == [1, 3, 5] and arrays["bias_values"].tolist() == [2, 4, 4]
