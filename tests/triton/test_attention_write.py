"""Writes of K and V to pages, rope with the write, the arithmetic of eight-bit floats, page copies."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from .attention_cases import check
from .interpreter import prepare

COST = 6  # seconds
DEVICE = prepare()
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from isthmus.platforms.triton_kit.fp8 import DECODE_FACTOR, decode, encode  # noqa: E402
from isthmus.platforms.triton_kit.kv_write import copy_pages, rope_write, write_kv  # noqa: E402
from isthmus.platforms.triton_kit.launch import launch  # noqa: E402
from isthmus.platforms.triton_kit.paged import PagedKV, paged_kv  # noqa: E402

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@triton.jit
def encode_kernel(x, y, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, encode(tl.load(x + at), FORMAT))


@triton.jit
def decode_kernel(x, y, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, decode(tl.load(x + at), y.dtype.element_ty, FORMAT))


@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_fp8_codes_are_those_of_the_format(form):
    """Every code, every midpoint between two codes and its neighbours, zeros, and what is too large."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(FP8[form]).float()
    finite = torch.isfinite(values)
    levels = values[finite].unique()
    middles = (levels[1:] + levels[:-1]) / 2
    x = torch.cat([values[finite], middles, torch.nextafter(middles, torch.tensor(-1e9)),
                   torch.nextafter(middles, torch.tensor(1e9)), torch.tensor([0.0, -0.0, 1e-30, -1e-30])])
    x = torch.cat([x, torch.zeros(2048 - len(x))]).to(DEVICE)
    y = torch.empty(2048, dtype=torch.uint8, device=DEVICE)
    launch(encode_kernel, (1,), x, y, FORMAT=form, BLOCK=2048)
    assert torch.equal(y.cpu(), x.cpu().to(FP8[form]).view(torch.uint8))
    large = torch.tensor([1e6, -1e6, torch.inf, -torch.inf] * 4, device=DEVICE)
    launch(encode_kernel, (1,), large, y, FORMAT=form, BLOCK=16)
    peak = torch.finfo(FP8[form]).max
    assert y[:4].cpu().view(FP8[form]).float().tolist() == [peak, -peak, peak, -peak]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        back = torch.empty(256, dtype=dtype, device=DEVICE)
        launch(decode_kernel, (1,), codes.to(DEVICE), back, FORMAT=form, BLOCK=256)
        assert torch.equal(back.float().cpu()[finite] * DECODE_FACTOR[form], values[finite])


def tensors(tokens: int, heads: int, kv_heads: int, width: int, dtype=torch.float32, v_width: int = 0):
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((tokens, heads, width), (tokens, kv_heads, width), (tokens, kv_heads, v_width or width))
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kv_heads", "width", "page_size"), [(1, 16, 1), (3, 24, 5), (2, 64, 16), (9, 128, 16)])
def test_writes_land_at_their_slots_and_nowhere_else(dtype, kv_heads, width, page_size):
    kv = torch.full((4, 2, page_size, kv_heads, width), 7.0, dtype=dtype, device=DEVICE)
    before = kv.clone()
    _, k, v = tensors(3, 1, kv_heads, width)
    where = slots(3 * page_size, 2 * page_size - 1, page_size * 2)
    write_kv(k, v, where, paged_kv(kv))
    for t, slot in enumerate(where.tolist()):
        before[slot // page_size, 0, slot % page_size] = k[t].to(dtype)
        before[slot // page_size, 1, slot % page_size] = v[t].to(dtype)
    assert torch.equal(kv, before)


def test_k_and_v_of_a_packed_projection_and_different_widths():
    packed = torch.randn(2, 5, 32, device=DEVICE)
    k_pages, v_pages = torch.zeros(2, 4, 2, 32, device=DEVICE), torch.zeros(2, 4, 2, 16, device=DEVICE)
    write_kv(packed[:, 1:3], packed[:, 3:, :16], slots(4, 6), PagedKV(k_pages, v_pages))
    assert torch.equal(k_pages[1, ::2], packed[:, 1:3]) and torch.equal(v_pages[1, ::2], packed[:, 3:, :16])


@pytest.mark.parametrize(("kind", "native"), [
    (torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True), (torch.float8_e5m2, False), (torch.float8_e5m2, True),
    (torch.float8_e4m3fnuz, True)])
def test_fp8_is_scaled_rounded_and_clamped(kind, native):
    kv = torch.zeros(2, 2, 4, 2, 32, device=DEVICE).to(kind)
    _, k, v = tensors(2, 1, 2, 32)
    k[0, 0, 0], v[1, 1, 3] = 1e6, -1e7
    write_kv(k, v, slots(5, 7), paged_kv(kv, k_scale=0.5, v_scale=4.0, native_fp8=native))
    peak = torch.finfo(kind).max
    for part, x, scale in ((0, k, 0.5), (1, v, 4.0)):
        right = (x / scale).clamp(-peak, peak).to(kind)
        assert torch.equal(kv[1, part, 1::2].float(), right.float())
    assert not kv[0].float().any() and not kv[1, :, ::2].float().any()


def test_int8_has_one_scale_per_head_and_token():
    kv = torch.zeros(2, 2, 4, 3, 24, dtype=torch.int8, device=DEVICE)
    scales = torch.full((2, 2, 4, 3), 9.0, device=DEVICE)
    _, k, v = tensors(2, 1, 3, 24)
    v[1, 2] = 0
    write_kv(k, v, slots(5, 7), paged_kv(kv, scales))
    for part, x in ((0, k), (1, v)):
        scale = x.abs().amax(-1) / 127
        torch.testing.assert_close(scales[1, part, 1::2], scale)
        value = kv[1, part, 1::2].float() * scale[..., None]
        assert bool(((value - x).abs() <= scale[..., None] * 0.5001).all())
        assert int(kv[1, part, 1::2].abs().max()) == 127
    assert bool((scales[1, :, ::2] == 9).all()) and bool((scales[0] == 9).all())


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> np.ndarray:
    """Half-split rotation of the first dims in float64."""
    x, cos, sin = (y.double().cpu().numpy() for y in (x, cos, sin))
    half = cos.shape[1]
    first, second, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


@pytest.mark.parametrize(("heads", "kv_heads", "width", "half"), [(4, 2, 16, 8), (7, 1, 64, 32), (5, 5, 24, 4),
                                                                  (20, 3, 80, 16), (1, 1, 128, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_turns_q_and_k_and_writes(heads, kv_heads, width, half, dtype):
    q, k, v = tensors(3, heads, kv_heads, width, dtype)
    angles = torch.arange(3)[:, None] * torch.linspace(0.1, 2, half)[None] + 0.3
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    kv = torch.zeros(3, 2, 4, kv_heads, width, dtype=dtype, device=DEVICE)
    kept = q.clone()
    out = rope_write(q, k, v, cos, sin, slots(4, 8, 11), paged_kv(kv))
    tolerance = 1e-6 if dtype == torch.float32 else 2 ** -8
    flat = kv.transpose(1, 2).reshape(12, 2, kv_heads, width)[[4, 8, 11]]
    check(out, turned(q, cos, sin), tolerance)
    check(flat[:, 0], turned(k, cos, sin), tolerance)
    assert torch.equal(flat[:, 1], v) and torch.equal(q, kept) and out.dtype == dtype


def test_rope_into_fp8_and_int8():
    q, k, v = tensors(2, 2, 2, 32, torch.bfloat16)
    angles = torch.linspace(0.1, 2, 32).reshape(2, 16)
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    kv = torch.zeros(2, 2, 4, 2, 32, device=DEVICE).to(torch.float8_e4m3fn)
    rope_write(q, k, v, cos, sin, slots(4, 6), paged_kv(kv))
    check(kv[1, 0, ::2].float(), turned(k, cos, sin), 2 ** -4)
    codes, scales = torch.zeros(2, 2, 4, 2, 32, dtype=torch.int8, device=DEVICE), torch.zeros(2, 2, 4, 2, device=DEVICE)
    rope_write(q, k, v, cos, sin, slots(4, 6), paged_kv(codes, scales))
    check((codes.float() * scales[..., None])[1, 0, ::2], turned(k, cos, sin), 2e-2)


def test_pages_are_copied_whole():
    for dtype, shape in ((torch.float32, (6, 2, 3, 5)), (torch.bfloat16, (6, 2, 4, 700)), (torch.uint8, (6, 12))):
        memory = torch.randint(0, 100, shape).to(DEVICE, dtype)
        right = memory.clone()
        right[[4, 2]] = memory[[1, 3]]
        copy_pages(memory, slots(1, 3, 0), slots(4, 2, 0))
        assert torch.equal(memory, right)


def test_what_does_not_fit_is_told():
    _, k, v = tensors(2, 1, 2, 16)
    kv = paged_kv(torch.zeros(2, 2, 4, 2, 16, device=DEVICE))
    with pytest.raises(ValueError, match="do not fit pages"):
        write_kv(k[:, :1], v, slots(1, 2), kv)
    with pytest.raises(ValueError, match="slots must be int32"):
        write_kv(k, v, slots(1, 2).long(), kv)
    with pytest.raises(ValueError, match="do not fit k"):
        rope_write(k, k, v, torch.ones(2, 9, device=DEVICE), torch.ones(2, 9, device=DEVICE), slots(1, 2), kv)
    with pytest.raises(ValueError, match="float32 tables"):
        rope_write(k, k, v, torch.ones(2, 8, device=DEVICE).double(), torch.ones(2, 8, device=DEVICE), slots(1, 2), kv)
    with pytest.raises(ValueError, match="multiples of 4 bytes"):
        copy_pages(torch.zeros(2, 3, dtype=torch.uint8, device=DEVICE), slots(0), slots(1))
    with pytest.raises(ValueError, match="int32 lists of one length"):
        copy_pages(torch.zeros(2, 4, device=DEVICE), slots(0), slots(1, 1))
