"""The interpreter's corrections: what it got silently wrong is right or refused."""
from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from .interpreter import prepare

COST = 12  # seconds
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


SCALARS = (tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.float32, tl.float64, tl.bfloat16,
           tl.float8e4nv, tl.pointer_type(tl.float32))
SHAPES = ((), (4,), (2, 4), (2, 1))
NUMBERS = (0, 1, -1, 300, 2 ** 31, -2 ** 40, 2 ** 63, True, 0.5, float("-inf"), 1e300)
FLAGS = ((), (True, True), (True, False), (False, False, True, True))


def tensors() -> list[tl.tensor]:
    """One of each kind, of values that differ."""
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype
    found = []
    for scalar, shape in itertools.product(SCALARS, SHAPES):
        data = (np.arange(1, 1 + math.prod(shape)) % 5).reshape(shape or (1,)).astype(_get_np_dtype(scalar))
        found.append(tl.tensor(TensorHandle(data, scalar), tl.block_type(scalar, list(shape)) if shape else scalar))
    return found


def outcome(function, *operands) -> list[object]:
    """Types, shapes and bytes of what Triton's function gives, or its complaint."""
    from triton.runtime.interpreter import interpreter_semantic
    try:
        with np.errstate(all="ignore"):
            found = function(interpreter_semantic, *operands)
    except Exception as error:
        return [type(error), str(error)]
    return [(x.type.name, x.dtype.name, str(x.shape), x.numel.value, x.handle.dtype.name, x.handle.data.dtype,
             x.handle.data.shape, x.handle.data.tobytes()) for x in (found if isinstance(found, tuple) else [found])]


def semantic() -> type:
    from triton.runtime.interpreter import TritonSemantic
    return TritonSemantic


@interpreted
@pytest.mark.parametrize("flags", FLAGS)
def test_what_is_kept_of_two_types_is_what_triton_works_out(flags):
    check = semantic().binary_op_type_checking_impl
    some = [*tensors(), *NUMBERS]
    for left, right in itertools.product(some, some):
        expected = outcome(check.__wrapped__, left, right, *flags)
        for _ in range(2):  # the first keeps it
            assert outcome(check, left, right, *flags) == expected, (left, right)


@interpreted
@pytest.mark.parametrize("name", ["broadcast_impl_value", "cast"])
def test_broadcasts_and_casts_are_triton_s(name):
    quick = getattr(semantic(), name)
    for left, right in itertools.product(tensors(), tensors() if name != "cast" else SCALARS):
        assert outcome(quick, left, right) == outcome(quick.__wrapped__, left, right), (left, right)


@interpreted
def test_blocks_of_one_type_are_one_object_and_say_what_triton_s_say():
    for scalar, shape in itertools.product(SCALARS, filter(None, SHAPES)):
        one, other = tl.block_type(scalar, list(shape)), tl.block_type(scalar, [tl.constexpr(n) for n in shape])
        assert one is other and one.shape.values == list(shape) and one.numel == math.prod(shape)
        assert one.scalar == scalar and one.name == f"<{one.shape}, {scalar}>"
    for shape in ([], [3]):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError)):
                tl.block_type(tl.int32, shape)


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
