"""A stand-in for AITER's operators on the CPU, of torch's, bound to the real signatures (ci/aiter_signatures.json).
faults: by name, what to do to a result in place, for trials that must notice."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from isthmus.platforms.rocm.aiter_library import Library
from isthmus.platforms.rocm.aiter_products import unshuffled
from torch.nn import functional as F

from .cuda_flashinfer.products import spread

CALLS: Counter[str] = Counter()
ActivationType = Enum("ActivationType", ("No", "Silu", "Gelu", "Swiglu"))
QuantType = Enum("QuantType", ("No", "per_Tensor", "per_Token", "per_1x32", "per_1x128", "per_128x128"))


def library(bind: Mapping[str, Callable[..., object]], version: str,
            faults: Mapping[str, Callable[[torch.Tensor], object]] | None = None) -> Library:
    def bound(name: str, call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            bind[name](*args, **kwargs)
            CALLS[name] += 1
            out = call(*args, **kwargs)
            if faults and name in faults:
                faults[name](out)
            return out
        return run
    calls = {"gemm_a8w8": rows, "gemm_a8w8_blockscale": blocks, "fused_moe": fused, "shuffle_weight": shuffle}
    return Library(version, {name: bound(name, call) for name, call in calls.items()} | {
        "ActivationType": ActivationType, "QuantType": QuantType})


def rows(XQ: torch.Tensor, WQ: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor,
         dtype: torch.dtype) -> torch.Tensor:
    assert XQ.dtype == WQ.dtype and x_scale.dtype == w_scale.dtype == torch.float32
    assert x_scale.shape == (len(XQ), 1) and w_scale.shape == (1, len(WQ)) and x_scale.is_contiguous()
    return (XQ.float() @ WQ.float().T * x_scale * w_scale).to(dtype)


def blocks(XQ: torch.Tensor, WQ: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor,
           dtype: torch.dtype) -> torch.Tensor:
    assert XQ.dtype == WQ.dtype and x_scale.dtype == w_scale.dtype == torch.float32
    assert x_scale.shape == (len(XQ), XQ.shape[1] // 128) and w_scale.shape == (len(WQ) // 128, WQ.shape[1] // 128)
    return (XQ.float() * x_scale.repeat_interleave(128, -1) @ spread(WQ, w_scale).T).to(dtype)


def shuffle(x: torch.Tensor, layout: tuple[int, int]) -> torch.Tensor:
    """16 outputs of one piece of 16 bytes of inputs lie one behind the other."""
    piece = 16 // x.element_size()
    parts = x.view(torch.uint8).view(-1, x.shape[-2] // layout[0], layout[0], x.shape[-1] // (2 * layout[1]),
                                     2 * layout[1] // piece, 16)
    return parts.permute(0, 1, 3, 4, 2, 5).contiguous().view(*x.shape[:-1], -1).view(x.dtype)


def narrow(x: torch.Tensor, kind: torch.dtype, group: int) -> torch.Tensor:
    """To the largest of the kind that AITER uses, and back; by token and `group` values."""
    parts = x.float().unflatten(-1, (-1, group))
    largest = torch.finfo(kind).max
    scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-30) / largest
    return ((parts / scale).clamp(-largest, largest).to(kind).float() * scale).flatten(-2)


def fused(hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weight: torch.Tensor,
          topk_ids: torch.Tensor, activation: ActivationType, quant_type: QuantType,
          w1_scale: torch.Tensor | None = None, w2_scale: torch.Tensor | None = None) -> torch.Tensor:
    assert activation is ActivationType.Silu and topk_ids.dtype == torch.int32 and topk_weight.dtype == torch.float32
    dtype, group = hidden_states.dtype, 128 if quant_type is QuantType.per_128x128 else 0
    first, second = unshuffled(w1), unshuffled(w2)
    if quant_type is not QuantType.No:
        first, second = (spread(each, scale) if group else each.float() * scale
                         for each, scale in ((first, w1_scale), (second, w2_scale)))

    def seen(x: torch.Tensor) -> torch.Tensor:
        return x.float() if quant_type is QuantType.No else narrow(x, w1.dtype, group or x.shape[-1])
    ids = topk_ids.long()
    gate, up = torch.einsum("td,tkfd->tkf", seen(hidden_states), first[ids].float()).chunk(2, -1)
    hidden = seen((F.silu(gate) * up).to(dtype))
    results = torch.einsum("tkf,tkdf->tkd", hidden, second[ids].float()).to(dtype).float()
    return (results * topk_weight[..., None]).sum(1).to(dtype)
