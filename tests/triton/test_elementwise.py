"""Norm, rope, activations and the soft cap against float64."""
from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .interpreter import prepare

DEVICE = prepare()
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from isthmus.platforms.triton_kit import activation, norm, rope  # noqa: E402
from isthmus.platforms.triton_kit.launch import launch  # noqa: E402

COST = 8
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # two steps of the type
DTYPES = tuple(TOLERANCE)
few = settings(max_examples=12, deadline=None, derandomize=True)


def values(seed: int, *shape: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> torch.Tensor:
    return (torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)) * size).to(dtype).to(DEVICE)


def wide(x: torch.Tensor) -> np.ndarray:
    return x.cpu().double().numpy()


def near(got: torch.Tensor, want: np.ndarray, dtype: torch.dtype | None = None) -> None:
    np.testing.assert_allclose(wide(got), want, rtol=TOLERANCE[dtype or got.dtype], atol=TOLERANCE[dtype or got.dtype])


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x ** 2).mean(-1, keepdims=True) + eps) * weight


@few
@given(st.integers(0, 99), st.sampled_from(DTYPES), st.sampled_from([1, 3, 5]), st.sampled_from([1, 8, 33, 100, 1030]),
       st.sampled_from([1e-6, 1e-2]))
def test_rms_norm(seed, dtype, rows, width, eps):
    x, weight = values(seed, rows, width, dtype=dtype, size=3), values(seed + 1, width)
    near(norm.rms_norm(x, weight, eps), rms(wide(x), wide(weight), eps))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_within_a_wider_tensor(dtype):
    qkv, weight = values(3, 5, 12, 16, dtype=dtype), values(4, 16, dtype=dtype)
    for part in (qkv[:, :8], qkv[:, 8:10], qkv[2:3, 10:]):
        near(norm.rms_norm(part, weight, 1e-5), rms(wide(part), wide(weight), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_the_residual_as_a_separate_addition_would(dtype):
    x, residual, weight = values(5, 4, 96, dtype=dtype), values(6, 4, 96, dtype=dtype), values(7, 96)
    normed, total = norm.rms_norm(x, weight, 1e-6, residual=residual)
    assert torch.equal(total, x + residual)
    near(normed, rms(wide(total), wide(weight), 1e-6))


@pytest.mark.parametrize("shape", [(5, 96), (3, 4, 16)])
@pytest.mark.parametrize("dtype", list(norm.QUANTIZED))
def test_rms_norm_quantizes_per_row(dtype, shape):
    x, weight = values(8, *shape, dtype=torch.bfloat16), values(9, shape[-1])
    x[1] = 0
    (codes, scales), total = norm.rms_norm(x, weight, 1e-6, residual=torch.zeros_like(x), dtype=dtype)
    assert codes.dtype == dtype and codes.shape == x.shape and scales.shape == x.shape[:-1]
    want = rms(wide(total), wide(weight), 1e-6)
    limit = norm.QUANTIZED[dtype][1]
    largest = np.abs(want).max(-1)
    np.testing.assert_allclose(wide(scales), np.where(largest > 0, largest / limit, norm.SMALLEST_SCALE), rtol=1e-6)
    exact = want / wide(scales)[..., None]
    got = wide(codes.float())
    # The nearest code: half a step of 1, or of the format's mantissa, away at most (a little more for float32).
    step = np.ones_like(exact) if dtype == torch.int8 else {
        torch.float8_e4m3fn: lambda e: np.maximum(e, -6) - 3, torch.float8_e4m3fnuz: lambda e: np.maximum(e, -7) - 3,
        torch.float8_e5m2: lambda e: np.maximum(e, -14) - 2}[dtype](np.floor(np.log2(np.abs(exact) + 1e-30)))
    step = step if dtype == torch.int8 else 2.0 ** step
    assert (np.abs(got - exact) <= 0.5001 * step + 1e-4).all()
    assert (got[1] == 0).all()


@triton.jit
def quantize_kernel(x, out, KIND: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, norm.quantized(tl.load(x + at), 2.0, KIND, LIMIT))


@pytest.mark.parametrize("dtype", list(norm.QUANTIZED))
def test_quantization_rounds_ties_to_even_and_saturates(dtype):
    kind, limit = norm.QUANTIZED[dtype]
    x = torch.linspace(-8, 8, 1024, dtype=torch.float64).mul(4).round().div(8).float()
    x[:6] = torch.tensor([1e6, -1e6, limit, -0.0, 2.5, 3.5])
    x = x.to(DEVICE)
    out = torch.empty(1024, dtype=dtype, device=DEVICE)
    launch(quantize_kernel, (1,), 2 * x, out if kind == "int8" else out.view(torch.uint8), KIND=kind, LIMIT=limit,
           BLOCK=1024)
    inside = x.clamp(-limit, limit)
    want = inside.round() if dtype == torch.int8 else inside.to(dtype).float()
    assert torch.equal(out.float(), want)


def test_norms_refuse_what_they_cannot_read():
    x = values(0, 4, 6)
    with pytest.raises(ValueError, match="contiguous"):
        norm.rms_norm(x.T, torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="32768"):
        norm.rms_norm(torch.empty(1, 40000, device=DEVICE), torch.ones(40000), 1e-6)


@few
@given(st.lists(st.sampled_from([0, 1, 2, 77, 4095, 131071, 2 ** 20, 2 ** 31 - 1]), min_size=1, max_size=20),
       st.sampled_from([1, 5, 32, 96]), st.sampled_from([1e2, 1e4, 5e6]), st.sampled_from([1.0, 0.8]))
def test_rope_tables_are_right_at_every_position(positions, half, theta, scale):
    inv_freq = theta ** -(np.arange(half) / half)
    cos, sin = rope.rope_tables(torch.tensor(positions, dtype=torch.int32, device=DEVICE),
                                rope.turns_of(inv_freq, DEVICE), scale)
    angles = np.array(positions, np.longdouble)[:, None] * inv_freq.astype(np.longdouble)
    # Tables of 1e-7, and what a frequency in float64 leaves undecided at such a position.
    bound = 2e-7 + max(positions) * 1e-15
    assert np.abs(wide(cos) - scale * np.cos(angles)).max() < bound
    assert np.abs(wide(sin) - scale * np.sin(angles)).max() < bound


@few
@given(st.integers(0, 99), st.sampled_from(DTYPES), st.sampled_from([(8, 4), (16, 8), (24, 12), (16, 4), (20, 5)]),
       st.sampled_from([1, 3, 8]), st.booleans())
def test_rope(seed, dtype, sizes, heads, in_place):
    (width, half), tokens = sizes, 3
    x = values(seed, tokens, heads + 2, width, dtype=dtype)[:, 1:heads + 1]
    inv_freq = 1e4 ** -(np.arange(half) / half)
    positions = np.array([0, 5, 70000])
    cos, sin = rope.rope_tables(torch.from_numpy(positions).int().to(DEVICE), rope.turns_of(inv_freq, DEVICE))
    before = wide(x)
    got = rope.apply_rope(x, cos, sin, out=x if in_place else None)
    angles = positions[:, None, None] * inv_freq
    first, second, rest = before[..., :half], before[..., half:2 * half], before[..., 2 * half:]
    near(got, np.concatenate([first * np.cos(angles) - second * np.sin(angles),
                              second * np.cos(angles) + first * np.sin(angles), rest], -1))
    assert (got.data_ptr() == x.data_ptr()) == in_place
    assert np.array_equal(wide(got)[..., 2 * half:], rest)


def test_rope_refuses_more_frequencies_than_a_head_has():
    with pytest.raises(ValueError, match="8 frequencies"):
        rope.apply_rope(values(0, 1, 1, 8), values(1, 1, 8), values(2, 1, 8))


ACTS = {"silu": lambda x: x / (1 + np.exp(-x)), "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
        "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))}


@few
@given(st.integers(0, 99), st.sampled_from(DTYPES), st.sampled_from(activation.KINDS),
       st.sampled_from([1, 7, 70, 1100]))
def test_act_mul_of_halves_of_one_tensor(seed, dtype, kind, width):
    both = values(seed, 3, 2 * width, dtype=dtype, size=4)
    gate, up = both[:, :width], both[:, width:]
    got = activation.act_mul(gate, up, kind)
    assert got.dtype == dtype
    near(got, ACTS[kind](wide(gate)) * wide(up))


@pytest.mark.parametrize("kind", activation.KINDS)
def test_one_gate_goes_over_a_row(kind):
    gate, up = values(1, 4, 1), values(2, 4, 40)
    near(activation.act_mul(gate, up, kind), ACTS[kind](wide(gate)) * wide(up))


def test_act_mul_refuses_unknown_kinds_and_shapes():
    with pytest.raises(ValueError, match="relu"):
        activation.act_mul(values(0, 2, 2), values(0, 2, 2), "relu")
    with pytest.raises(ValueError, match="one gate a row"):
        activation.act_mul(values(0, 2, 3), values(0, 2, 6), "silu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_softcap(dtype, cap):
    x = values(3, 3, 130, dtype=dtype, size=20)
    x[0, :6] = torch.tensor([0.0, -0.0, 1e-5, -1e-3, 1e4, -torch.inf])
    got = activation.softcap(x, cap)
    near(got, cap * np.tanh(wide(x) / cap))
    assert got[0, 2] != 0 or dtype == torch.float16
