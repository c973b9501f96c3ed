"""The interpreter's corrections: what it got silently wrong is right or refused."""
from __future__ import annotations

import pytest
import torch

from .interpreter import prepare

DEVICE = prepare()
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from isthmus.platforms.triton_kit.launch import Specialization, launch, recording  # noqa: E402

interpreted = pytest.mark.skipif(DEVICE.type != "cpu", reason="about the interpreter")


@triton.jit
def cast_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


@triton.jit
def dot_kernel(a, b, c, N: tl.constexpr):
    at = tl.arange(0, N)
    places = at[:, None] * N + at[None, :]
    tl.store(c + places, tl.dot(tl.load(a + places), tl.load(b + places)))


@triton.jit
def double_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(y + at, value + value)


@triton.jit
def sum_kernel(x, y, BLOCK: tl.constexpr):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, BLOCK)), 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_round_to_nearest_even(dtype):
    torch.manual_seed(0)
    x = (torch.randn(1024) * 20).to(DEVICE)
    ties = torch.tensor([1 + 2.0 ** -8, 1 + 3 * 2.0 ** -8, 2.0 ** -9, 0.0, -0.0])
    x[:5] = ties.to(DEVICE)
    y = torch.empty(1024, dtype=dtype, device=DEVICE)
    launch(cast_kernel, (1,), x, y, BLOCK=1024)
    assert torch.equal(y.float(), x.to(dtype).float())
    back = torch.empty(1024, device=DEVICE)
    launch(cast_kernel, (1,), y, back, BLOCK=1024)
    assert torch.equal(back, y.float())


@pytest.mark.parametrize("source", [torch.int8, torch.uint8, torch.int32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_integers_become_floats_by_value(source, dtype):
    x = torch.arange(-64 if source.is_signed else 64, 64 if source.is_signed else 192, dtype=source, device=DEVICE)
    y = torch.empty(128, dtype=dtype, device=DEVICE)
    launch(cast_kernel, (1,), x, y, BLOCK=128)
    assert torch.equal(y, x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_multiplies_values_and_not_bit_patterns(dtype):
    torch.manual_seed(1)
    a, b = (torch.randn(16, 16).to(DEVICE, dtype) for _ in range(2))
    c = torch.empty(16, 16, device=DEVICE)
    launch(dot_kernel, (1,), a, b, c, N=16)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), atol=1e-2, rtol=1e-2)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("kernel", [double_kernel, sum_kernel])
def test_arithmetic_on_narrow_floats_is_refused(kernel, dtype):
    x, y = torch.ones(16).to(dtype), torch.empty(16, dtype=dtype)
    with pytest.raises(Exception, match="to\\(tl.float32\\)"):
        launch(kernel, (1,), x, y, BLOCK=16)


def test_a_recorder_sees_each_launch_of_its_thread_and_block():
    x, y = torch.ones(16, device=DEVICE), torch.empty(16, device=DEVICE)
    seen = []
    with recording(lambda *call: seen.append(call)):
        launch(double_kernel, (1,), x, y, BLOCK=16)
        launch(double_kernel, (0,), x, y, BLOCK=16)  # an empty grid starts nothing
    launch(double_kernel, (1,), x, y, BLOCK=16)
    assert len(seen) == 1
    kernel, grid, args, meta = seen[0]
    assert kernel is double_kernel and grid == (1,) and args[0] is x and args[1] is y and meta == {"BLOCK": 16}
    y.zero_()
    kernel[grid](*args, **meta)
    assert torch.equal(y, torch.full_like(y, 2))


def test_a_specialization_says_its_options_and_where_it_is_not_to_run():
    spec = Specialization("x", None, {}, warps=4, stages=3, unsupported={"sm_80": "no fp8"},
                          tuning={"gfx": {"num_stages": 2}, "gfx942": {"num_warps": 8}})
    assert spec.options("sm_90") == {"num_warps": 4, "num_stages": 3}
    assert spec.options("gfx1100") == {"num_warps": 4, "num_stages": 2}
    assert spec.options("gfx942") == {"num_warps": 8, "num_stages": 3}
    assert spec.reason("sm_80") == "no fp8" and spec.reason("sm_90") is None
