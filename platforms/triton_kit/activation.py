"""Activations of gated feed-forward layers, and the soft cap of logits."""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Specialization, launch

KINDS = ("silu", "gelu_tanh", "gelu", "sigmoid")


@triton.jit
def tanh(x):
    """In float32; a series near 0, where the exponentials would cancel."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.25, series, 1 - 2 / (tl.exp(2 * x) + 1))


@triton.jit
def act(x, KIND: tl.constexpr):
    """One of KINDS, of float32. gelu_tanh: Hendrycks and Gimpel 2016, the approximation with tanh."""
    if KIND == "silu":
        y = x / (1 + tl.exp(-x))
    elif KIND == "sigmoid":
        y = 1 / (1 + tl.exp(-x))
    elif KIND == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "gelu_tanh")
        y = 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return y


@triton.jit
def act_mul_kernel(gate, up, out, width, gate_row, up_row, STEP: tl.constexpr, KIND: tl.constexpr,
                   BLOCK: tl.constexpr):
    """STEP 0: one gate a row; 1: one an element."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    g = tl.load(gate + row * gate_row + at * STEP, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (act(g, KIND) * u).to(out.dtype.element_ty), mask=mask)


@triton.jit
def softcap_kernel(x, out, width, x_row, cap, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * x_row + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (cap * tanh(value / cap)).to(out.dtype.element_ty), mask=at < width)


def act_mul(gate: torch.Tensor, up: torch.Tensor, kind: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """act(gate) * up in float32 inside, [T, F] in up's dtype, contiguous. kind: one of KINDS.

    gate: [T, F], or [T, 1] for one gate a row. Both may be slices of one tensor with a contiguous last axis.
    """
    if kind not in KINDS:
        raise ValueError(f"no activation {kind!r}; there are {', '.join(KINDS)}")
    rows, width = up.shape
    if gate.shape not in ((rows, width), (rows, 1)) or up.stride(1) != 1 or (gate.shape[1] > 1 and gate.stride(1) != 1):
        raise ValueError(f"act_mul of a gate {list(gate.shape)} and {list(up.shape)}, strides {gate.stride()} and "
                         f"{up.stride()}: the same shape or one gate a row, with a contiguous last axis")
    out = torch.empty(rows, width, dtype=up.dtype, device=up.device) if out is None else out
    block = min(1024, triton.next_power_of_2(width))
    launch(act_mul_kernel, (rows, triton.cdiv(width, block)), gate, up, out, width, gate.stride(0),
           up.stride(0), STEP=int(gate.shape[1] == width), KIND=kind, BLOCK=block, num_warps=4)
    return out


def softcap(x: torch.Tensor, cap: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """cap * tanh(x / cap) of [T, F], in float32 inside, in x's dtype."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device) if out is None else out
    block = min(1024, triton.next_power_of_2(width))
    launch(softcap_kernel, (rows, triton.cdiv(width, block)), x, out, width, x.stride(0), cap, BLOCK=block,
           num_warps=4)
    return out


def specializations() -> list[Specialization]:
    """Every kind in bf16, silu in f16 and f32 too, one gate a row, the soft cap in bf16 and f32."""
    found = []
    for type_, kind, step in (*(("bf16", kind, 1) for kind in KINDS), ("fp16", "silu", 1), ("fp32", "silu", 1),
                              ("bf16", "sigmoid", 0)):
        found.append(Specialization(
            f"act_mul {type_} {kind}" + ("" if step else " of one gate a row"), act_mul_kernel,
            {"gate": f"*{type_}:16", "up": f"*{type_}:16", "out": f"*{type_}:16", "width": "i32:16",
             "gate_row": "i32:16" if step else "i32", "up_row": "i32:16"},
            {"STEP": step, "KIND": kind, "BLOCK": 1024}))
    for type_ in ("bf16", "fp32"):
        found.append(Specialization(f"softcap {type_}", softcap_kernel,
                                    {"x": f"*{type_}:16", "out": f"*{type_}:16", "width": "i32:16", "x_row": "i32:16",
                                     "cap": "fp32"}, {"BLOCK": 1024}))
    return found
