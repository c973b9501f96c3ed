"""Affine 4- and 8-bit linears against float64."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from .interpreter import prepare

DEVICE = prepare()
from isthmus.platforms.triton_kit.linear_int4 import affine_linear, pack_affine, specializations  # noqa: E402
from isthmus.platforms.triton_kit.linear_tiles import Tile, linear_tile  # noqa: E402

COST = 5  # seconds
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2 ** -8, torch.float16: 2 ** -10}


def made(rows: int, width: int, group: int, bits: int, seed: int, zero: bool, scale_type=np.float16):
    """Codes, scales and minima as a checkpoint has them; with `zero` minima are whole numbers of scales."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (rows, width), dtype=np.uint8)
    groups = width // group
    scale = (rng.uniform(0.5, 1.5, (rows, groups)) / (1 << bits)).astype(scale_type).astype(np.float32)
    points = rng.integers(1, 1 << bits, (rows, groups))
    minimum = -scale * points.astype(np.float32) if zero else rng.normal(-0.3, 0.2, (rows, groups)).astype(scale_type)
    return codes, scale, minimum.astype(np.float32)


def expanded(codes, scale, minimum, group) -> np.ndarray:
    return codes.astype(np.float64) * scale.repeat(group, 1).astype(np.float64) + minimum.repeat(group, 1)


def close(out: torch.Tensor, x: torch.Tensor, w: np.ndarray, bias: torch.Tensor | None) -> None:
    """Within rounding of the result and float32 error of sums of the products' size."""
    right = x.double().cpu().numpy() @ w.T
    size = np.abs(x.double().cpu().numpy()) @ np.abs(w).T
    if bias is not None:
        right = right + bias.double().cpu().numpy()
    error = np.abs(out.double().cpu().numpy() - right)
    assert (error <= TOLERANCE[out.dtype] * np.abs(right) + 1e-5 * size + 1e-6).all(), error.max()


CASES = [  # tokens, rows, width, group (0 = row), bits, zero point, type, tile
    (1, 48, 256, 128, 4, True, torch.bfloat16, Tile(32, 16, 128)),
    (3, 40, 256, 128, 4, False, torch.float16, Tile(32, 16, 128, 2)),
    (5, 33, 96, 32, 4, False, torch.bfloat16, Tile(32, 16, 128, 2)),     # the last panel is half empty
    (2, 33, 32, 32, 4, True, torch.bfloat16, Tile(32, 16, 128)),         # a single group
    (2, 20, 192, 64, 4, False, torch.bfloat16, Tile(32, 16, 128)),
    (17, 70, 512, 256, 4, True, torch.bfloat16, Tile(64, 16, 128)),
    (2, 18, 72, 0, 4, False, torch.bfloat16, Tile(32, 16, 128)),         # by row, ragged
    (4, 34, 320, 0, 4, True, torch.float32, Tile(32, 16, 128, 2)),
    (2, 34, 96, 32, 8, False, torch.bfloat16, Tile(32, 16, 128)),
    (3, 34, 256, 128, 8, False, torch.float16, Tile(32, 16, 128, 2)),
    (2, 34, 200, 0, 8, True, torch.bfloat16, Tile(32, 16, 128)),
    (35, 70, 128, 64, 8, False, torch.float32, Tile(32, 32, 128)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(part) for part in c[:6]))
@pytest.mark.parametrize("biased", [False, True])
def test_linear(case, biased):
    tokens, rows, width, group, bits, zero, dtype, tile = case
    parts = made(rows, width, group or width, bits, tokens + width, zero)
    weight = pack_affine(*(torch.from_numpy(part).to(DEVICE) for part in parts), bits)
    assert weight.zero == zero and weight.scale.dtype == torch.float16
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    bias = torch.randn(rows).to(DEVICE, dtype) if biased else None
    close(affine_linear(x, weight, bias, tile), x, expanded(*parts, group or width), bias)


def test_activations_far_from_zero():
    """The constant that unpacking adds to codes must cancel."""
    parts = made(32, 256, 128, 4, 1, True)
    weight = pack_affine(*parts, 4)
    x = (100 + torch.randn(2, 256)).bfloat16().to(DEVICE)
    close(affine_linear(x, weight._replace(codes=weight.codes.to(DEVICE), scale=weight.scale.to(DEVICE),
                                           second=weight.second.to(DEVICE)), None, Tile(32, 16, 128)),
          x, expanded(*parts, 128), None)


def test_split_sums_have_the_same_bits_every_time():
    weight = pack_affine(*(torch.from_numpy(part).to(DEVICE) for part in made(32, 512, 128, 4, 3, False)), 4)
    x = torch.randn(2, 512).bfloat16().to(DEVICE)
    first = affine_linear(x, weight, None, Tile(32, 16, 128, 4))
    assert torch.equal(first, affine_linear(x, weight, None, Tile(32, 16, 128, 4)))


def test_rows_of_a_larger_tensor():
    """Activations may be a slice with a stride; what lies behind a row is not read, not even a NaN."""
    parts = made(32, 96, 32, 4, 5, False)
    weight = pack_affine(*(torch.from_numpy(part).to(DEVICE) for part in parts), 4)
    whole = torch.full((3, 160), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    whole[:, :96] = torch.randn(3, 96)
    close(affine_linear(whole[:, :96], weight, None, Tile(32, 16, 128)), whole[:, :96], expanded(*parts, 32), None)


def test_signed_codes_and_experts_are_packed_exactly():
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (2, 16, 64), dtype=np.int8)
    scale = rng.uniform(0.5, 1, (2, 16, 2)).astype(np.float16).astype(np.float32)
    weight = pack_affine(codes, scale, np.zeros_like(scale), 8)
    assert weight.experts == 2 and weight.zero and weight.group == 32 and tuple(weight.codes.shape) == (2, 2, 16, 32)
    values = weight.codes.float().movedim(1, 2).reshape(2, 16, 64) - weight.second.float()[:, :1, :, None].reshape(
        2, 16, 1)
    assert np.array_equal(values.numpy(), codes)


def test_scales_keep_every_bit():
    parts = list(made(8, 64, 32, 4, 0, False, np.float32))
    assert pack_affine(*parts, 4).scale.dtype == torch.float32
    parts[1:] = [torch.from_numpy(part).bfloat16().float() * 2.0 ** -30 for part in parts[1:]]
    assert pack_affine(*parts, 4).scale.dtype == torch.bfloat16


def test_mistakes_are_told():
    codes, scale, minimum = made(8, 96, 32, 4, 0, False)
    with pytest.raises(ValueError, match="groups of 48"):
        pack_affine(codes, scale[:, :2], minimum[:, :2], 4)
    with pytest.raises(ValueError, match="do not fit"):
        pack_affine(codes, scale[:4], minimum, 4)
    with pytest.raises(ValueError, match="4 bits up to 16"):
        pack_affine(codes + 1, scale, minimum, 4)
    with pytest.raises(ValueError, match="width 96"):
        affine_linear(torch.zeros(2, 64), pack_affine(codes, scale, minimum, 4))
    with pytest.raises(ValueError, match="bias of shape"):
        affine_linear(torch.zeros(2, 96), pack_affine(codes, scale, minimum, 4), torch.zeros(4))


def test_tiles_and_configurations():
    for family in ("sm_80", "sm_90", "sm_120", "gfx942", "gfx1100"):
        for tokens in (1, 16, 64, 65, 4096):
            tile = linear_tile("affine4", tokens, 4096, 4096, family)
            assert (8 if family[0] == "s" else 16) <= tile.tokens <= 128 and tile.splits <= 16
    assert linear_tile("affine4", 1, 4096, 1024).splits > 1 == linear_tile("affine4", 4096, 4096, 4096).splits
    names = [s.name for s in specializations()]
    assert len(names) == len(set(names))
