"""The reference platform beyond the shared cases: numbers worked by hand, its own life cycle, and what it refuses."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from isthmus.conformance.formats import quantized
from isthmus.conformance.opcase import normal, parts, table, token_batch
from isthmus.core import discovery
from isthmus.core.plan import Batch, Penalties, Sampling
from isthmus.core.platform import (
    FEATURES,
    AttentionSpec,
    LayerState,
    RawTensor,
    StateSpec,
    Unavailable,
    Unsupported,
    WeightSpec,
)
from isthmus.platforms.reference.attention import attend
from isthmus.platforms.reference.quant import Dense, QuantLinear
from isthmus.platforms.reference.sampling import apply_penalties, best_ids, choose, draw


@pytest.fixture
def platform() -> Any:
    made = discovery.load_platform("reference")
    made.probe()
    return made


def penalties(rows: list[list[int]], outputs: list[list[int]], repetition: list[float], presence: list[float],
              frequency: list[float]) -> Penalties:
    entries = [(row, token, outputs[row].count(token)) for row in range(len(rows))
               for token in sorted(set(rows[row] + outputs[row]))]
    listed = np.array(entries, np.int32).reshape(-1, 3).T
    pending = np.zeros(len(rows), np.int32)
    return Penalties(*listed, pending, *(np.float32(x) for x in (repetition, presence, frequency)))


def penalized(logits: list[list[float]], *args: Any) -> list[list[float]]:
    array = np.array(logits)
    apply_penalties(array, penalties(*args), np.zeros(len(logits), np.int32))
    return array.tolist()


@pytest.mark.parametrize("settings, expected", [
    ((2.0, 0.0, 0.0), [1.0, 0.5, 1.5, 0.5]),
    ((1.0, 0.5, 0.0), [2.0, 1.0, 2.5, 0.5]),
    ((1.0, 0.0, 0.5), [2.0, 1.0, 2.0, 0.5]),
    ((1.0, 0.0, 0.0), [2.0, 1.0, 3.0, 0.5]),
])
def test_repetition_counts_once_and_the_others_in_the_output_only(settings: tuple, expected: list[float]) -> None:
    got = penalized([[2.0, 1.0, 3.0, 0.5]], [[0, 0, 0, 1]], [[2, 2]], *([value] for value in settings))
    assert got == [expected]


def test_penalties_of_one_row_leave_its_neighbours_alone() -> None:
    logits = [[0.3, -0.7, 1.1], [-2.0, 4.0, -6.0], [1.0, 1.0, 1.0]]
    got = penalized(logits, [[0], [0, 1, 2, 2], []], [[], [0], [2, 2, 1]], [1, 2, 1], [0, 0, -0.5], [0, 0, 0.25])
    assert got == [logits[0], [-4.0, 2.0, -12.0], [1.0, 1.25, 1.0]]


HALVES = np.log(2) * -np.array([3.0, 1.0, 2.0, 4.0, 4.0])  # probabilities 1/8, 1/2, 1/4, 1/16, 1/16
EQUAL = np.zeros(4)  # a quarter each, without rounding


def pick(uniform: float, logits: np.ndarray = HALVES, **fields: float) -> int:
    kinds = {"top_k": np.int32}
    arrays = {name: np.array([value], kinds.get(name, np.float32)) for name, value in fields.items()}
    sampling = Sampling(**{"temperature": np.ones(1, np.float32), "uniform": np.float32([uniform])} | arrays)
    return int(draw(logits, 0, sampling))


@pytest.mark.parametrize("uniform, token", [(0.0, 0), (0.124, 0), (0.126, 1), (0.62, 1), (0.63, 2), (0.87, 2),
                                            (0.88, 3), (0.93, 3), (0.94, 4), (0.9999999, 4)])
def test_the_draw_runs_through_the_ids_in_order(uniform: float, token: int) -> None:
    assert pick(uniform) == token


def test_at_the_boundary_the_draw_moves_on_and_top_p_is_content() -> None:
    assert [pick(uniform, EQUAL) for uniform in (0.0, 0.2499, 0.25, 0.5, 0.75)] == [0, 0, 1, 2, 3]
    assert {pick(uniform, EQUAL, top_p=0.5) for uniform in np.linspace(0, 0.9999, 50)} == {0, 1}


@pytest.mark.parametrize("fields, kept", [
    ({"top_k": 1}, {1}), ({"top_k": 4}, {0, 1, 2, 3}), ({"top_k": 0}, {0, 1, 2, 3, 4}), ({"top_k": 9}, {0, 1, 2, 3, 4}),
    ({"top_p": 0.49}, {1}), ({"top_p": 0.51}, {1, 2}), ({"top_p": 0.93}, {0, 1, 2, 3}), ({"top_p": 0.0}, {1}),
    ({"top_p": 1e-9}, {1}), ({"top_k": 2, "top_p": 0.66}, {1}), ({"min_p": 0.24}, {0, 1, 2}), ({"min_p": 1.0}, {1}),
    ({"min_p": 0.49, "top_k": 4}, {1, 2}), ({"temperature": 0.0}, {1}), ({"temperature": 1e-38}, {1}),
])
def test_what_each_parameter_keeps(fields: dict[str, float], kept: set[int]) -> None:
    assert {pick(uniform, **fields) for uniform in np.linspace(0, 0.9999, 200)} == kept


def test_draws_over_even_uniforms_follow_the_distribution() -> None:
    count = 1600
    tokens = [pick((i + 0.5) / count) for i in range(count)]
    assert np.bincount(tokens).tolist() == [200, 800, 400, 100, 100]


def test_among_equals_the_lowest_id_is_greedy() -> None:
    assert best_ids(np.array([1.0, 3.0, 3.0, 2.0]), 3).tolist() == [1, 2, 3]
    assert choose(np.zeros((2, 5)), np.array([-1, 4]), Sampling(), np.zeros(2, int)).tolist() == [0, 4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_legal_token_still_gives_one(temperature: float) -> None:
    sampling = Sampling(np.float32([temperature]), np.float32([0.5]))
    assert draw(np.full(4, -np.inf), 0, sampling) == 0


@pytest.mark.parametrize("window", [1, 2, 8, 20, 21, None])
def test_a_window_of_w_sees_w_tokens_with_its_own(window: int | None) -> None:
    count = 20
    zeros, marks = np.zeros((count, 1, count)), np.eye(count)[:, None]
    shares = attend(zeros, zeros, marks, np.arange(count), AttentionSpec(1.0, window))[:, 0]
    seen = [[j for j in range(i + 1) if window is None or j > i - window] for i in range(count)]
    assert [np.flatnonzero(row).tolist() for row in shares] == seen
    last = attend(zeros[-1:], zeros, marks, np.array([count - 1]), AttentionSpec(1.0, window))[:, 0]
    np.testing.assert_array_equal(last, shares[-1:])


def test_kept_formats_stay_codes_and_others_are_expanded(platform: Any) -> None:
    rng = np.random.default_rng(0)
    for name, kind in (("q4_0", np.uint8), ("q4_1", np.uint8), ("q8_0", np.int8)):
        raw, _ = quantized(rng, name, (8, 64))
        leaf = platform.load([raw, raw], WeightSpec(("a", "b"), "linear"), "f64")
        assert isinstance(leaf, QuantLinear) and leaf.codes.dtype == kind and leaf.codes.shape == (16, 64)
        assert "groups of 32" in platform.describe(leaf)
    leaf = platform.load([quantized(rng, "q5_1", (8, 64))[0]], WeightSpec(("a",), "linear"), "f32")
    assert isinstance(leaf, Dense) and leaf.values.dtype == np.float32


@pytest.mark.parametrize("name", ["f32", "q8_0"])
def test_weights_outlive_the_bytes_they_came_from(platform: Any, name: str) -> None:
    raw, values = quantized(np.random.default_rng(0), name, (4, 32))
    leaf = platform.load([raw], WeightSpec(("a",), "embed"), "f64")
    raw.data[:] = 0
    np.testing.assert_allclose(leaf.rows(np.arange(4)), values)


def start(platform: Any, forward: Any) -> tuple[Any, Any]:
    """A step over inputs x [4, 32], and a state with one layer."""
    x = normal(np.random.default_rng(3), (4, 32), "f64")
    weights = {"x": platform.load(*table(x), "f64")}
    state = platform.alloc(StateSpec((LayerState(1, 32),), "f64", 16, 8), 8)
    return platform.compile(forward, weights, None), state


def self_attention(ops: Any, w: Any, batch: Batch) -> Any:
    x = ops.embed(batch.tokens, w["x"]).reshape(-1, 1, 32)
    return ops.attention(x, x, x, 0, AttentionSpec(1.0))


def test_a_failed_step_raises_in_collect_and_spares_other_pages(platform: Any) -> None:
    step, state = start(platform, self_attention)
    batch = token_batch(4)
    first, state = step(state, batch)
    expected = first.collect()
    failed, state = step(state, batch._replace(tokens=np.array([0, 99, 2, 3], np.int32)))
    with pytest.raises(IndexError, match="99"):
        failed.collect()
    again, state = step(state, batch)
    np.testing.assert_array_equal(again.collect(), expected)


def test_exported_pages_must_fit(platform: Any) -> None:
    _, state = start(platform, self_attention)
    data = platform.export_pages(state, [1, 2])
    assert len(data) == 2 * state.spec.page_bytes()
    with pytest.raises(ValueError, match="3 pages take"):
        platform.import_pages(state, [1, 2, 3], data)


def test_the_manifest_claims_what_the_ledger_does_not_deny(platform: Any) -> None:
    manifest = platform.probe()
    assert manifest.features == set(FEATURES) and manifest.rank == 0 and manifest.determinism == "T1"
    assert all(platform.supports(word) is None for word in FEATURES)
    assert 0 < manifest.memory_free <= manifest.memory_total


@pytest.mark.parametrize("question, words", [
    ({"op": "linear", "format": "q4_1", "dtype": "bf16"}, "bf16"), ({"op": "linear", "format": "iq1_s"}, "iq1_s"),
    ({"op": "fft"}, "fft"),
])
def test_supports_gives_the_reason(platform: Any, question: dict[str, str], words: str) -> None:
    assert words in platform.supports(**question)
    assert platform.supports("linear", format="q6_k", dtype="f32") is None


def test_what_is_refused(platform: Any) -> None:
    with pytest.raises(Unavailable, match="4 ranks"):
        platform.probe(0, 4)
    with pytest.raises(Unavailable, match="threads"):
        discovery.load_platform("reference", {"threads": "8"})
    with pytest.raises(Unsupported, match="bf16"):
        platform.alloc(StateSpec((LayerState(1, 32),), "bf16", 16, 2), 2)
    with pytest.raises(Unsupported, match="bf16.*f64 or f32"):
        platform.load(*parts([quantized(np.random.default_rng(0), "f32", (2, 32))[0]]), "bf16")
    with pytest.raises(Unsupported, match="blk.0.*iq1_s"):
        platform.load([RawTensor("iq1_s", (1, 256), b"")], WeightSpec(("blk.0",), "linear"), "f64")
