"""MXFP4 and NVFP4 linears against float64."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from .interpreter import prepare

DEVICE = prepare()
from isthmus.platforms.triton_kit.fp4 import fp4_linear, pack_fp4, specializations  # noqa: E402
from isthmus.platforms.triton_kit.linear_tiles import Tile  # noqa: E402

COST = 4  # seconds
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def made(kind: str, rows: int, width: int):
    """A checkpoint's codes and scales, and the values they stand for."""
    rng = np.random.default_rng(width)
    codes = rng.integers(0, 256, (rows, width // 2), dtype=np.uint8)
    values = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(rows, width)]
    if kind == "mxfp4":
        exponents = rng.integers(118, 125, (rows, width // 32), dtype=np.uint8)
        return codes, torch.from_numpy(exponents), None, values * 2.0 ** (exponents.astype(float) - 127).repeat(32, 1)
    scale = torch.from_numpy(rng.uniform(0.002, 448, (rows, width // 16)).astype(np.float32)).to(torch.float8_e4m3fn)
    scale[0, 0], scale[-1, -1] = 2.0 ** -9, 448  # the smallest, a subnormal number, and the largest
    right = values * scale.double().numpy().repeat(16, 1) * float(np.float32(2e-3))
    return codes, scale, torch.tensor(2e-3), right


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens, rows, width, tile", [
    (1, 33, 160, Tile(32, 16, 128, 2)), (18, 40, 32, Tile(32, 16, 128)), (3, 32, 256, Tile(32, 16, 128))])
def test_linear(kind, dtype, tokens, rows, width, tile):
    codes, scale, total, w = made(kind, rows, width)
    weight = pack_fp4(torch.from_numpy(codes).to(DEVICE), scale.to(DEVICE), total)
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    bias = torch.randn(rows, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    out = fp4_linear(x, weight, bias, tile)
    assert out.dtype == dtype
    x64 = x.double().cpu().numpy()
    right = x64 @ w.T + bias.double().cpu().numpy()
    error = np.abs(out.double().cpu().numpy() - right)
    step = {torch.float32: 1e-6, torch.bfloat16: 2 ** -8, torch.float16: 2 ** -10}[dtype]
    assert (error <= step * np.abs(right) + 2e-6 * (np.abs(x64) @ np.abs(w).T) + 1e-6).all(), error.max()


def test_every_code_is_exact():
    """One-hot activations read the weight back, bit by bit; the least e8m0 scale too."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(8, 32)  # [8, 64] values
    scale = torch.full((8, 2), 127, dtype=torch.uint8)
    scale[0, 0], scale[1, 1] = 0, 200
    out = fp4_linear(torch.eye(64, device=DEVICE), pack_fp4(codes.to(DEVICE), scale.to(DEVICE)), None,
                     Tile(16, 64, 128))
    bits = codes.numpy()
    right = E2M1[np.stack([bits & 15, bits >> 4], -1).reshape(8, 64)] * 2.0 ** (scale.double().numpy() - 127).repeat(
        32, 1)
    assert np.array_equal(out.double().cpu().numpy().T, right)


def test_stacked_parts_have_their_own_global_scale():
    codes, scale, _, _ = made("nvfp4", 16, 64)
    codes = torch.from_numpy(codes)
    both = pack_fp4(codes, scale, torch.tensor([0.5, 2.0]), (4, 12))
    assert both.second.tolist() == [0.5] * 4 + [2.0] * 12
    experts = pack_fp4(codes.reshape(2, 8, 32), scale.reshape(2, 8, 4), torch.tensor([0.5, 2.0]))
    assert experts.second.tolist() == [[0.5] * 8, [2.0] * 8] and experts.experts == 2


def test_mistakes_are_told():
    codes, scale = torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="one for 32 values"):
        pack_fp4(codes, scale[:, :1])
    with pytest.raises(ValueError, match="NaN"):
        pack_fp4(codes, scale + 255)
    with pytest.raises(ValueError, match="has none"):
        pack_fp4(codes, scale, torch.tensor(1.0))
    with pytest.raises(ValueError, match="not torch.uint8 with torch.float32"):
        pack_fp4(codes, scale.float())


def test_configurations_are_named_apart():
    names = [s.name for s in specializations()]
    assert len(names) == len(set(names))
