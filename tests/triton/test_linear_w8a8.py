"""Quantization of activations, and linears in int8 and fp8, against float64."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from .interpreter import prepare

DEVICE = prepare()
from isthmus.platforms.triton_kit import linear_kernel, linear_w8a8, quantize, quantize_static  # noqa: E402
from isthmus.platforms.triton_kit.linear_tiles import Tile  # noqa: E402

COST = 6  # seconds
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
TILE = Tile(32, 16, 64)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def float64(x: torch.Tensor) -> np.ndarray:
    return x.cpu().float().double().numpy()


def step_of(value: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Half a step of the type at stored values."""
    if dtype == torch.int8:
        return np.full_like(value, 0.5)
    least = 2.0 ** (-6 if dtype == torch.float8_e4m3fn else -7)
    return 2.0 ** np.floor(np.log2(np.maximum(np.abs(value), least))) / 16


@pytest.mark.parametrize("dtype", [torch.int8, *FP8], ids=str)
@pytest.mark.parametrize("width", [128, 200])
def test_tokens(dtype, width):
    x = random(4, width).to(torch.bfloat16)
    x[1] = 0
    x[2] *= 1e-4
    x[3, 5] = 3e4
    values, scale = quantize.quantize_tokens(x.to(DEVICE), dtype)
    right, q, s = float64(x), float64(values), float64(scale)
    largest = {torch.int8: 127, FP8[0]: 448, FP8[1]: 240}[dtype]
    assert np.allclose(s[[0, 2, 3]], np.abs(right).max(1)[[0, 2, 3]] / largest, rtol=1e-6)
    assert (q[1] == 0).all() and (np.abs(q).max(1)[[0, 2, 3]] == largest).all()
    assert (np.abs(right / s[:, None] - q) <= step_of(right / s[:, None], dtype) * 1.0001).all()


@pytest.mark.parametrize("dtype", [torch.int8, *FP8], ids=str)
def test_groups(dtype):
    x = random(3, 1200).to(torch.bfloat16)
    x[1, 128:256] = 0
    x[2, 256:384] *= 1e3
    values, scale = quantize.quantize_groups(x.to(DEVICE), dtype)
    assert tuple(scale.shape) == (3, 10)
    s = float64(scale).repeat(128, 1)[:, :1200]
    assert (float64(values)[1, 128:256] == 0).all()
    assert (np.abs(float64(x) / s - float64(values)) <= step_of(float64(x) / s, dtype) * 1.0001).all()


def test_long_rows_are_read_twice(monkeypatch):
    """A row of several blocks has one scale, and the bits of the row in one block."""
    x = random(2, 300).to(DEVICE)
    once = quantize.quantize_tokens(x, torch.int8)
    monkeypatch.setattr(quantize, "ONE_BLOCK", 64)
    twice = quantize.quantize_tokens(x, torch.int8)
    assert torch.equal(once.values, twice.values) and torch.equal(once.scale, twice.scale)


def test_int8_rounds_ties_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, -0.5, -2.5, 126.5]]).to(DEVICE)
    assert quantize.quantize_tokens(x, torch.int8).values.tolist() == [[127, 0, 2, 0, -2, 126]]


def close(out: torch.Tensor, right: np.ndarray, size: np.ndarray) -> None:
    error = np.abs(out.double().cpu().numpy() - right)
    step = {torch.float32: 1e-6, torch.bfloat16: 2 ** -8, torch.float16: 2 ** -10}[out.dtype]
    assert (error <= step * np.abs(right) + 1e-5 * size + 1e-6).all(), error.max()


@pytest.mark.parametrize("tokens, rows, width, tile", [(1, 48, 128, TILE), (5, 33, 200, TILE._replace(splits=2)),
                                                       (19, 70, 64, TILE)])
@pytest.mark.parametrize("biased", [False, True])
def test_int8(tokens, rows, width, tile, biased):
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (rows, width), dtype=np.int8)
    scale = rng.uniform(0.01, 0.02, (rows, 1)).astype(np.float32)
    weight = linear_w8a8.int8_matrix(torch.from_numpy(codes).to(DEVICE), torch.from_numpy(scale).to(DEVICE))
    x = random(tokens, width).bfloat16().to(DEVICE)
    bias = random(rows).bfloat16().to(DEVICE) if biased else None
    quantized = quantize.quantize_tokens(x, torch.int8)
    out = linear_w8a8.w8a8_linear(x, weight, bias, tile)
    xq = float64(quantized.values) * float64(quantized.scale)[:, None]
    w = codes * scale.astype(np.float64)
    right = xq @ w.T + (float64(bias) if biased else 0)
    close(out, right, np.abs(xq) @ np.abs(w).T)
    # And what quantization costs: half a step of each activation.
    assert (np.abs(right - (float64(x) @ w.T + (float64(bias) if biased else 0)))
            <= float64(quantized.scale)[:, None] / 2 * 1.001 * np.abs(w).sum(1)).all()
    assert torch.equal(out, linear_w8a8.w8a8_linear(quantized, weight, bias, tile))


@pytest.mark.parametrize("unit", ["fn", "fnuz", "cast", "none"])
@pytest.mark.parametrize("per", ["tensor", "parts", "channel", "block"])
@pytest.mark.parametrize("tokens, width, tile", [(3, 200, TILE._replace(splits=2)), (18, 256, TILE)])
def test_fp8(unit, per, tokens, width, tile):
    parts, rows = 2, 72  # two stacked parts whose blocks of 128 start anew
    w = random(rows, width).to(torch.float8_e4m3fn)
    w[0, :4] = torch.tensor([0.0, -0.0, 448.0, 2.0 ** -9]).to(torch.float8_e4m3fn)
    scale = {"tensor": torch.tensor(0.03), "parts": torch.tensor([0.03, 0.5]), "channel": random(rows, 1).abs(),
             "block": random(parts, 2).abs()}[per]
    spread = scale.reshape(-1, 1) if per != "block" else scale
    spread = spread.repeat_interleave(rows // len(spread), 0)
    spread = spread.repeat_interleave(128, 1)[:, :width] if per == "block" else spread.expand(rows, width)
    weight = linear_w8a8.fp8_matrix(w.to(DEVICE), scale.to(DEVICE), unit, block=per == "block",
                                    parts=parts if per == "block" else 1, sizes=(36, 36) if per == "parts" else None)
    assert weight.codes.dtype == {"fnuz": FP8[1], "none": torch.uint8}.get(unit, FP8[0])
    x = random(tokens, width, seed=1).bfloat16().to(DEVICE)
    values, x_scale = linear_w8a8.quantized_for(x, weight)
    xq = float64(values)
    if x_scale is not None:
        assert values.dtype == {"fn": FP8[0], "fnuz": FP8[1]}[unit]
        xq = xq * (float64(x_scale)[:, None] if x_scale.ndim == 1 else
                   float64(x_scale).repeat(128, 1)[:, :width])
    out = linear_w8a8.w8a8_linear(x, weight, None, tile)
    right = float64(w) * float64(spread)
    close(out, xq @ right.T, np.abs(xq) @ np.abs(right).T)


def test_one_scale_for_all_tokens():
    """Static activation scales of checkpoints: a single number."""
    w = random(16, 64).to(torch.float8_e4m3fn)
    weight = linear_w8a8.fp8_matrix(w.to(DEVICE), torch.tensor(0.5).to(DEVICE), "fn")
    x = (random(3, 64) / 0.25).to(torch.float8_e4m3fn)
    out = linear_w8a8.w8a8_linear(quantize.Quantized(x.to(DEVICE), torch.tensor([0.25]).to(DEVICE)), weight, None, TILE)
    close(out, float64(x) * 0.25 @ float64(w).T * 0.5, np.abs(float64(x)) @ np.abs(float64(w)).T)


@pytest.mark.parametrize("dtype", [torch.int8, *FP8], ids=str)
@pytest.mark.parametrize("width", [128, 200, 5000])
def test_a_calibrated_scale_cuts_what_is_beyond_it(dtype, width):
    """Also in e4m3fnuz the numbers are e4m3's."""
    x = random(3, width).to(torch.bfloat16)
    x[1], x[2, 5], x[2, 6] = 0, 3e4, -3e4
    wide = torch.cat([x, x], 1).to(DEVICE)[:, :width]  # rows that lie apart
    scale = quantize_static.static_scale(0.01, dtype, DEVICE)
    values, kept = quantize_static.quantize_static(wide, dtype, scale)
    assert kept is scale and tuple(values.shape) == (3, width)
    largest = 127 if dtype == torch.int8 else 448
    scaled = torch.clamp(x.float() / torch.tensor(0.01), -largest, largest)
    right = scaled.round() if dtype == torch.int8 else scaled.to(FP8[0]).float()
    assert np.allclose(float64(values) * float64(scale), float64(right) * 0.01, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="contiguous rows"):
        quantize_static.quantize_static(wide.T, dtype, scale)


def test_no_tokens():
    weight = linear_w8a8.int8_matrix(torch.zeros(16, 64, dtype=torch.int8, device=DEVICE), torch.ones(16).to(DEVICE))
    assert linear_w8a8.w8a8_linear(torch.zeros(0, 64, device=DEVICE), weight).shape == (0, 16)


def test_fnuz_keeps_every_value():
    """All 256 codes: half the value, minus zero becomes zero, NaN stays NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    half = linear_w8a8.fnuz_bits(codes).float() * 2
    assert torch.equal(torch.nan_to_num(half, 1e9), torch.nan_to_num(codes.float(), 1e9))


def test_mistakes_are_told():
    w = torch.zeros(16, 64, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="torch.int8, not"):
        linear_w8a8.int8_matrix(w, torch.ones(16))
    with pytest.raises(ValueError, match="'e5m2'"):
        linear_w8a8.fp8_matrix(w, torch.ones(16), "e5m2")
    with pytest.raises(ValueError, match="block scales"):
        linear_w8a8.fp8_matrix(w, torch.ones(16, 1), "fn", block=True)
    with pytest.raises(ValueError, match="quantize them"):
        linear_kernel.linear(torch.zeros(2, 64), linear_w8a8.fp8_matrix(w, torch.ones(16), "fn"), None, TILE)
    with pytest.raises(ValueError, match="not to torch.float16"):
        quantize.quantize_tokens(torch.zeros(2, 64), torch.float16)


def test_configurations_are_named_apart():
    for module in (linear_w8a8, quantize, quantize_static, linear_kernel):
        names = [s.name for s in module.specializations()]
        assert len(names) == len(set(names))
