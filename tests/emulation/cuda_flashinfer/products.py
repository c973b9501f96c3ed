"""A stand-in for FlashInfer's products and fused experts on the CPU, of torch's operators, by the signatures of the
real ones, and with their checks. faults: by name, what to do to a result in place, for trials that must notice."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

CALLS: Counter[str] = Counter()
NAMES = ("gemm.fp8_blockscale_gemm_sm90", "gemm.gemm_base.fp8_gemm_sm100", "gemm.mm_bf16_fp4",
         "fused_moe.cutlass_fused_moe")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Fault = Callable[[torch.Tensor], object]


def check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def products(bind: Mapping[str, Callable[..., object]], faults: Mapping[str, Fault] | None = None) -> SimpleNamespace:
    """`gemm` and `fused_moe` of the library."""
    faults = faults or {}

    def bound(name: str, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            if name in bind:
                bind[name](*args, **kwargs)
            CALLS[name] += 1
            out = call(*args, **kwargs)
            if name in faults:
                faults[name](out)
            return out
        return run
    calls = dict(zip(NAMES, (blocks, one_scale, fp4, fused), strict=True))
    blocks_, tensor_, fp4_, fused_ = (bound(name, call) for name, call in calls.items())
    return SimpleNamespace(
        gemm=SimpleNamespace(fp8_blockscale_gemm_sm90=blocks_, mm_bf16_fp4=fp4_,
                             gemm_base=SimpleNamespace(fp8_gemm_sm100=tensor_)),
        fused_moe=SimpleNamespace(cutlass_fused_moe=fused_))


def narrow(x: torch.Tensor) -> torch.Tensor:
    """Quantized to e4m3 by token and 128 values, and back."""
    parts = x.float().unflatten(-1, (-1, 128))
    scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
    return ((parts / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def spread(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A weight in blocks of 128 x 128."""
    rows, width = codes.shape[-2:]
    scale = scale.repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :width]
    return codes.float() * scale


def blocks(input: torch.Tensor, weight: torch.Tensor, input_scale: torch.Tensor | None = None,
           weight_scale: torch.Tensor | None = None, out: torch.Tensor | None = None,
           out_dtype: torch.dtype | None = None) -> torch.Tensor:
    rows, width = weight.shape
    check(input.dtype == torch.bfloat16 and weight.dtype == torch.float8_e4m3fn, "dtypes")
    check(input_scale is None and input.is_contiguous(), "input_scale should not be provided for BF16 inputs")
    check(rows % 64 == 0 and width % 128 == 0 and input.shape[1] == width, "dimensions")
    check(weight_scale.dtype == torch.float32 and tuple(weight_scale.shape) == (-(-rows // 128), width // 128),
          "weight_scale shape mismatch")
    return F.linear(narrow(input), spread(weight, weight_scale)).to(out_dtype)


def one_scale(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.Tensor,
              workspace_buffer: torch.Tensor, runner_names: list[str]) -> torch.Tensor:
    check(a.dtype == b.dtype == torch.float8_e4m3fn and a.dim() == b.dim() == out.dim() == 3, "operands")
    check(a.is_contiguous() and b.stride(1) == 1 and out.is_contiguous(), "B should be column major")
    check(a.shape[2] == b.shape[1] and tuple(out.shape) == (1, a.shape[1], b.shape[2]), "sizes")
    check(scale_a.numel() == scale_b.numel() == 1 and scale_a.dtype == scale_b.dtype == torch.float32, "scales")
    check(workspace_buffer.dtype == torch.uint8 and runner_names == ["cublas"], "workspace, or runners")
    return out.copy_((a.float() @ b.float() * scale_a * scale_b).to(out.dtype))


def fp4(a: torch.Tensor, b: torch.Tensor, b_descale: torch.Tensor, alpha: torch.Tensor | None = None, *, backend: str,
        out_dtype: torch.dtype | None = None) -> torch.Tensor:
    rows, width = b.shape[0], 2 * b.shape[1]
    check(backend == "blackwell-native" and a.dtype == torch.bfloat16 and b.dtype == torch.uint8, "dtypes")
    check(a.shape[1] == width and b.is_contiguous() and b_descale.is_contiguous(), "sizes")
    check(b_descale.dtype == torch.float8_e4m3fn and tuple(b_descale.shape) == (rows, width // 16),
          "blackwell-native expects linear float8_e4m3fn scales")
    check(alpha.dtype == torch.float32 and tuple(alpha.shape) == (1,), "alpha")
    values = E2M1[torch.stack((b & 15, b >> 4), -1).flatten(-2).long()]
    weight = values * b_descale.float().repeat_interleave(16, -1) * alpha
    return F.linear(a.float(), weight).to(out_dtype)


def fused(input: torch.Tensor, token_selected_experts: torch.Tensor, token_final_scales: torch.Tensor,
          fc1_expert_weights: torch.Tensor, fc2_expert_weights: torch.Tensor, output_dtype: torch.dtype,
          quant_scales: list[torch.Tensor], output: torch.Tensor, use_deepseek_fp8_block_scale: bool,
          use_fused_finalize: bool) -> torch.Tensor:
    experts, both, width = fc1_expert_weights.shape
    check(tuple(fc2_expert_weights.shape) == (experts, width, both // 2) and input.is_contiguous(), "sizes")
    check(token_selected_experts.dtype == torch.int32 and token_final_scales.dtype == torch.float32, "routing")
    check(output.dtype == output_dtype == input.dtype and not use_fused_finalize, "output")
    if _get_current_dispatch_mode() is None:  # a capture reads nothing
        check(bool(((token_selected_experts >= 0) & (token_selected_experts < experts)).all()), "experts")
    w13, w2, seen = fc1_expert_weights, fc2_expert_weights, input.float()
    if use_deepseek_fp8_block_scale:
        check(w13.dtype == torch.float8_e4m3fn and len(quant_scales) == 2 and both % 256 == width % 128 == 0, "blocks")
        w13, w2, seen = spread(w13, quant_scales[0]), spread(w2, quant_scales[1]), narrow(input)
    else:
        check(w13.dtype == w2.dtype == input.dtype and not quant_scales, "dtypes")
    ids = token_selected_experts.long()
    up, gate = torch.einsum("td,tkfd->tkf", seen, w13[ids].float()).to(output_dtype).float().chunk(2, -1)
    hidden = (F.silu(gate) * up).to(output_dtype)
    hidden = narrow(hidden) if use_deepseek_fp8_block_scale else hidden.float()
    results = torch.einsum("tkf,tkdf->tkd", hidden, w2[ids].float()).to(output_dtype).float()
    return output.copy_((results * token_final_scales[..., None]).sum(1))
