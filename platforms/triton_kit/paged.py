"""The pages of K and V of one layer as the kernels take them, and what is checked before a kernel reads them."""
from __future__ import annotations

from typing import NamedTuple

import torch

from .fp8 import DECODE_FACTOR

FP8_BITS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class PagedKV(NamedTuple):
    """K and V of one layer: views, whose last axis is contiguous.

    k: [pages, page_size, kv_heads, d], v: [pages, page_size, kv_heads, dv]; f32, bf16, f16, fp8, or bytes by `format`.
    k_scales, v_scales: [pages, page_size, kv_heads] f32 with the same strides, for int8; else None.
    k_scale, v_scale: value = scale * stored, for the whole tensor.
    format: "native" (the device casts), "e4m3" or "e5m2" (uint8, decoded by integer arithmetic), "int8".
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    format: str = "native"

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def read_scales(self) -> tuple[float, float]:
        """Factors of what the kernels' `decode` gives."""
        factor = DECODE_FACTOR.get(self.format, 1.0)
        return self.k_scale * factor, self.v_scale * factor


def paged_kv(kv: torch.Tensor, scales: torch.Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0,
             native_fp8: bool = False) -> PagedKV:
    """`PagedKV` of one tensor kv [pages, 2, page_size, kv_heads, head_dim]: K at [:, 0], V at [:, 1].

    scales [pages, 2, page_size, kv_heads] f32: needed with int8, refused otherwise.  native_fp8: the device converts
    this fp8 type by itself (sm_89 and later, gfx950 and gfx12 for OCP types, gfx942 for fnuz).
    """
    if kv.ndim != 5 or kv.shape[1] != 2 or kv.stride(-1) != 1:
        raise ValueError(f"kv must be [pages, 2, page_size, kv_heads, head_dim] with a contiguous last axis, "
                         f"not {tuple(kv.shape)} with strides {kv.stride()}")
    form = "native"
    if kv.dtype == torch.int8:
        form = "int8"
        if scales is None or scales.shape != kv.shape[:-1] or scales.dtype != torch.float32:
            raise ValueError(f"int8 K and V need float32 scales {tuple(kv.shape[:-1])}, one per head and token")
    elif scales is not None:
        raise ValueError(f"scales per token are for int8 K and V only, not {kv.dtype}: use k_scale and v_scale")
    elif kv.dtype in FP8_BITS and not native_fp8:
        form, kv = FP8_BITS[kv.dtype], kv.view(torch.uint8)
    k, v = kv.unbind(1)
    ks, vs = (None, None) if scales is None else scales.unbind(1)
    return PagedKV(k, v, ks, vs, k_scale, v_scale, form)


def check_attention(q: torch.Tensor, kv: PagedKV, pages: torch.Tensor, lengths: torch.Tensor) -> None:
    """Raise ValueError where shapes or types do not fit together; reads no data."""
    if q.ndim != 3 or q.shape[2] != kv.k.shape[3] or q.stride(2) != 1:
        raise ValueError(f"q must be [tokens, heads, {kv.k.shape[3]}] with a contiguous last axis, "
                         f"not {tuple(q.shape)} with strides {q.stride()}")
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"q is {q.dtype}: attention runs in float32, bfloat16 or float16")
    if q.shape[1] % kv.kv_heads:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {kv.kv_heads} KV heads")
    if pages.ndim != 2 or pages.dtype != torch.int32 or pages.stride(1) != 1:
        raise ValueError(f"pages must be an int32 table [rows, pages per row], not {pages.dtype} {tuple(pages.shape)}")
    if lengths.shape != pages.shape[:1] or lengths.dtype != torch.int32:
        raise ValueError(f"lengths must be int32 [{pages.shape[0]}], not {lengths.dtype} {tuple(lengths.shape)}")


def check_tree(tree: torch.Tensor | None, positions: torch.Tensor | None, tokens: int) -> None:
    """Raise ValueError unless both are absent, or tree is int64 [tokens] and positions int32 [tokens]."""
    if tree is None:
        return
    if tree.shape != (tokens,) or tree.dtype != torch.int64:
        raise ValueError(f"tree must be int64 [{tokens}], not {tree.dtype} {tuple(tree.shape)}")
    if positions is None or positions.shape != (tokens,) or positions.dtype != torch.int32:
        raise ValueError(f"a tree needs positions, int32 [{tokens}]: its tokens are not one after another")
