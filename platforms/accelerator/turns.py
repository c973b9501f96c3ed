"""Cosines and sines of rotary angles on the device, to float32 precision at any position, without float64 there.

cos(p f) and sin(p f) follow from p = a * STRIDE + b by the addition theorems, from tables that the host computes in
float64; float32 angles would be off by 1e-2 radians at a position of 10^5, and not every device has float64.
"""
from __future__ import annotations

import numpy as np
import torch

from ...core.platform import RopeSpec
from .device import Device

STRIDE = 4096  # rows of each table: they reach 16 million positions


class Turns:
    """Tables of each `RopeSpec`, kept for the platform's life."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.tables: dict[RopeSpec, tuple[torch.Tensor, ...]] = {}

    def at(self, positions: torch.Tensor, spec: RopeSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int [T] -> cosine and sine, float32 [T, rotated / 2] each, with the spec's factor."""
        if spec not in self.tables:
            self.tables[spec] = self._build(spec)
        coarse_cos, coarse_sin, fine_cos, fine_sin = self.tables[spec]
        a, b = positions // STRIDE, positions % STRIDE
        ca, sa, cb, sb = coarse_cos[a], coarse_sin[a], fine_cos[b], fine_sin[b]
        return ca * cb - sa * sb, sa * cb + ca * sb

    def _build(self, spec: RopeSpec) -> tuple[torch.Tensor, ...]:
        fine = np.arange(STRIDE, dtype=np.float64)[:, None] * np.array(spec.inv_freq)
        coarse = fine * STRIDE
        parts = (spec.scale * np.cos(coarse), spec.scale * np.sin(coarse), np.cos(fine), np.sin(fine))
        return tuple(torch.from_numpy(part.astype(np.float32)).to(self.device.torch) for part in parts)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[T, heads, head_dim], the first 2 * cos.shape[1] dims of each head turned half-split, the rest as they were."""
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :half].float(), x[..., half:2 * half].float()
    parts = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    return torch.cat(parts + ([x[..., 2 * half:]] if 2 * half < x.shape[-1] else []), -1)
