"""K and V memory of a layer, and the dtypes that it keeps them in."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...core.platform import LayerState, StateSpec
from .memory import HUGE, huge_bytes
from .quant import DTYPES

SMALL_FLOATS = {"f8_e4m3": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2}
# The bits of an 8-bit float are those of a half float up to a power of two: what a byte, its sign extended, is times,
# bits of the sign that are in the way then, and the factor. torch's own cast takes 2.7 times as long.
HALVES = {torch.float8_e4m3fn: (128, 0x4000, 256.0), torch.float8_e5m2: (256, 0, 1.0)}
KV_DTYPES = DTYPES | SMALL_FLOATS | {"i8": torch.int8}


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros, on huge pages if there are enough of them."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if nbytes < HUGE:
        return torch.zeros(shape, dtype=dtype)
    return torch.from_numpy(huge_bytes(nbytes)).view(dtype).view(shape)


@dataclass(frozen=True)
class LayerCache:
    """K and V of one layer, side by side for each token: [pages, page_size, 2, kv_heads, head_dim].

    pages: 8-bit floats as their bytes, since few of torch's operators take them.  dtype: of what they hold.
    scales: beside int8, float32 [pages, page_size, 2, kv_heads], of each head's vector.
    scale: of K and of V in 8-bit floats, [2, 1, 1]; None = 1.
    """

    pages: torch.Tensor
    dtype: torch.dtype
    scales: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    @classmethod
    def allocate(cls, pages: int, spec: StateSpec, layer: LayerState) -> LayerCache:
        dtype, shape = KV_DTYPES[spec.dtype], (pages, spec.page_size, 2, layer.kv_heads, layer.head_dim)
        if dtype == torch.int8:
            return cls(huge_zeros(shape, dtype), dtype, huge_zeros(shape[:-1], torch.float32))
        if spec.dtype not in SMALL_FLOATS:
            return cls(huge_zeros(shape, dtype), dtype)
        scale = torch.tensor([layer.k_scale, layer.v_scale])[:, None, None]
        return cls(huge_zeros(shape, torch.uint8), dtype, None, None if (scale == 1).all() else scale)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """All memory, pages first."""
        return (self.pages,) if self.scales is None else (self.pages, self.scales)

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """K and V [T, kv_heads, head_dim] to slots [T]; slot = page * page_size + offset."""
        for which, values in enumerate((k, v)):
            into = self.pages.flatten(0, 1)[:, which]
            if self.scales is not None:
                values, scales = quantized(values)
                self.scales.flatten(0, 1)[:, which].index_copy_(0, slots, scales)
            elif self.dtype.itemsize == 1:
                values = small_floats(values if self.scale is None else values.float() / self.scale[which], self.dtype)
            into.index_copy_(0, slots, values.to(into.dtype))

    def values(self, kept: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """What is kept [.., 2, kv_heads, head_dim], and the scales beside it [.., 2, kv_heads], as numbers."""
        if scales is not None:
            return kept.to(dtype).mul_(scales[..., None].to(dtype))
        if self.dtype.itemsize > 1:
            return kept.to(dtype)
        shift, cleared, factor = HALVES[self.dtype]
        half = kept.view(torch.int8).to(torch.int16).mul_(shift).bitwise_and_(~cleared).view(torch.float16)
        return half.float().mul_(factor if self.scale is None else factor * self.scale).to(dtype)


def quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors [.., head_dim] -> int8 codes of that shape, and float32 scales [..]: a vector's largest becomes 127."""
    wide = values.float()
    scales = wide.abs().amax(-1) / 127
    return (wide / torch.where(scales > 0, scales, 1)[..., None]).round_().to(torch.int8), scales


def small_floats(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of the nearest values, beyond the largest of the largest."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype).view(torch.uint8)
