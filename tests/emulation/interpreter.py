"""Triton's interpreter, with its arithmetic of narrow floats put right, for kernels without a device.

    from .interpreter import interpret
    interpret()  # before a module with kernels is imported

Of itself the interpreter (3.7 to 3.9) multiplies the bit patterns of bf16 in `tl.dot` and in all arithmetic, cuts
instead of rounding when it casts to bf16, takes integers for the bit patterns of bf16, and rounds fp8 wrongly. Here
`tl.dot` and casts are right, and other arithmetic on bf16 or fp8 is refused: a kernel says `.to(tl.float32)` first.
"""
from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from .quick import quicken


def interpret() -> None:
    """Choose the interpreter and put it right. Raises `RuntimeError` where TRITON_INTERPRET says otherwise, or where
    Triton was imported before, and `ImportError` without Triton."""
    if os.environ.setdefault("TRITON_INTERPRET", "1") in ("", "0"):
        raise RuntimeError("TRITON_INTERPRET=0 asks for compiled kernels")
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    if not isinstance(tl.sum, InterpretedFunction):
        raise RuntimeError("Triton was imported before its interpreter was chosen: set TRITON_INTERPRET=1")
    _correct()
    _stand_in_for_a_driver()


def _torch_type(kind: Any) -> torch.dtype:
    return {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
            "fp8e4nv": torch.float8_e4m3fn, "fp8e4b8": torch.float8_e4m3fnuz, "fp8e5": torch.float8_e5m2,
            "fp8e5b16": torch.float8_e5m2fnuz}[kind.scalar.name]


def _convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Bit patterns of `data` in another float type, rounded to nearest even; what overflows e4m3 becomes NaN."""
    if getattr(rounding, "name", None) == "RTZ":
        raise ValueError("kernels round to nearest even; another rounding is not put right here")
    signed = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
    bits = torch.from_numpy(np.array(data, order="C").view(signed[source.primitive_bitwidth // 8]))
    out = bits.view(_torch_type(source)).to(_torch_type(target))
    size = target.primitive_bitwidth // 8
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
    return out.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).numpy().view(unsigned[size])


def _narrow(kind: Any) -> bool:
    name = kind.scalar.name
    return name == "bf16" or name[:3] == "fp8"


def _refuse_narrow(*values: Any) -> None:
    for value in values:
        if _narrow(value.dtype):
            raise TypeError(f"arithmetic on {value.dtype}, which the interpreter does on the bit patterns: "
                            f"convert with .to(tl.float32) first")


def _correct() -> None:
    """Replace the interpreter's casts and products of narrow floats, once."""
    import triton.language as tl
    from triton.runtime import interpreter
    builder = interpreter.InterpreterBuilder
    if interpreter._convert_float is _convert:
        return
    interpreter._convert_float = _convert
    dot, binary, unary = builder.create_dot, builder.binary_op, builder.unary_op

    def widened(handle: Any) -> Any:
        if not _narrow(handle.dtype):
            return handle
        wide = _convert(handle.data, handle.dtype.scalar, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), d, *rest)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        _refuse_narrow(lhs, rhs)
        return binary(self, lhs, rhs, op)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        _refuse_narrow(arg)
        return unary(self, arg, op)

    cast = builder.cast_impl

    def create_int_to_fp(self: Any, src: Any, dst_type: Any) -> Any:
        if not _narrow(dst_type):
            return cast(self, src, dst_type)
        wide = np.asarray(src.data).astype(np.float32)
        return interpreter.TensorHandle(_convert(wide, tl.float32, dst_type.scalar, None), dst_type.scalar)

    builder.create_dot, builder.binary_op, builder.unary_op = create_dot, binary_op, unary_op
    builder.create_si_to_fp = builder.create_ui_to_fp = create_int_to_fp
    for kind in (interpreter.ReduceOps, interpreter.ScanOps):
        _refuse_in(kind)
    _know_fnuz(interpreter)
    quicken(interpreter)


def _know_fnuz(interpreter: Any) -> None:
    """Add AMD's e4m3fnuz to the types that the interpreter knows while a kernel runs (Triton itself has it)."""
    patch = interpreter._patch_lang_core

    def patch_lang_core(lang: Any, scope: Any) -> None:
        patch(lang, scope)
        to_ir = lang.dtype.to_ir

        def with_fnuz(self: Any, builder: Any) -> Any:
            return builder.get_fp8e4b8_ty() if self.name == "fp8e4b8" else to_ir(self, builder)

        scope.set_attr(lang.dtype, "to_ir", with_fnuz)

    interpreter._patch_lang_core = patch_lang_core


def _refuse_in(kind: Any) -> None:
    apply = kind.apply_impl

    def apply_impl(self: Any, inputs: Any) -> Any:
        _refuse_narrow(*inputs)
        return apply(self, inputs)

    kind.apply_impl = apply_impl


def _stand_in_for_a_driver() -> None:
    """Triton asks for an active driver here and there, even when it interprets."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    class Host(DriverBase):
        def __init__(self) -> None:
            pass

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_benchmarker(self) -> Any:
            return lambda function, **_: function()

    driver.set_active(Host())
