"""K and V of one layer as they are kept, and the way in and out of it that is composed of torch operators."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.platform import LayerState, StateSpec
from .device import Device

KV_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f8_e4m3": torch.float8_e4m3fn,
             "f8_e5m2": torch.float8_e5m2, "i8": torch.int8}


@dataclass(frozen=True, eq=False)
class LayerCache:
    """kv: [pages, 2, page_size, kv_heads, head_dim], K at [:, 0] and V at [:, 1], the layout that FlashInfer calls NHD.

    scales: float32 [pages, 2, page_size, kv_heads] beside int8: the values of a head's vector are its codes times its
    scale. k_scale, v_scale: the values of 8-bit floats are what is kept times these; 1 for other dtypes.
    """

    kv: torch.Tensor
    scales: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0

    @classmethod
    def allocate(cls, spec: StateSpec, layer: LayerState, pages: int, device: Device) -> LayerCache:
        dtype = KV_DTYPES[spec.dtype]
        shape = (pages, 2, spec.page_size, layer.kv_heads, layer.head_dim)
        kv = torch.zeros(shape, dtype=dtype, device=device.torch)
        if dtype == torch.int8:
            return cls(kv, torch.zeros(shape[:-1], dtype=torch.float32, device=device.torch))
        return cls(kv, None, layer.k_scale, layer.v_scale) if dtype.itemsize == 1 else cls(kv)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """All memory, pages first."""
        return (self.kv,) if self.scales is None else (self.kv, self.scales)

    @property
    def page_size(self) -> int:
        return self.kv.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.kv.shape[3]

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """K and V [T, kv_heads, head_dim] to their slots, page * page_size + offset."""
        for at, values, scale in zip(self._places(slots.long()), (k, v), (self.k_scale, self.v_scale), strict=True):
            if self.scales is None:
                codes = within(values if scale == 1 else values.float() / scale, self.kv.dtype)
            else:
                codes, scales = quantized(values)
                self.scales.view(-1, self.kv_heads).index_put_((at,), scales)
            self.kv.view(-1, *self.kv.shape[3:]).index_put_((at,), codes)

    def read(self, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [.., kv_heads, head_dim] of slots [..]."""
        k, v = (self._values(self.kv.view(-1, *self.kv.shape[3:])[at],
                             None if self.scales is None else self.scales.view(-1, self.kv_heads)[at], scale, dtype)
                for at, scale in zip(self._places(slots), (self.k_scale, self.v_scale), strict=True))
        return k, v

    def read_pages(self, pages: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [n * page_size, kv_heads, head_dim] of pages [n]."""
        kv = self.kv[pages].unbind(1)
        scales = (None, None) if self.scales is None else self.scales[pages].unbind(1)
        k, v = (self._values(*part, dtype).flatten(0, 1)
                for part in zip(kv, scales, (self.k_scale, self.v_scale), strict=True))
        return k, v

    def _places(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of K and of V, among all vectors of the memory."""
        at = slots // self.page_size * (2 * self.page_size) + slots % self.page_size
        return at, at + self.page_size

    def _values(self, kept: torch.Tensor, scales: torch.Tensor | None, scale: float,
                dtype: torch.dtype) -> torch.Tensor:
        if scales is not None:
            return (kept.float() * scales[..., None]).to(dtype)
        return kept.to(dtype) if scale == 1 else (kept.float() * scale).to(dtype)


def within(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast; what an 8-bit float does not reach is kept as its largest value."""
    if dtype.itemsize > 1:
        return values.to(dtype)
    largest = min(torch.finfo(dtype).max, torch.finfo(values.dtype).max)
    return values.clamp(-largest, largest).to(dtype)


def quantized(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors [.., head_dim] -> int8 codes of that shape, and float32 scales [..]: a vector's largest becomes 127."""
    wide = values.float()
    scales = wide.abs().amax(-1) / 127
    return (wide / torch.where(scales > 0, scales, 1)[..., None]).round().to(torch.int8), scales
