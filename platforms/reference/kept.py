"""How K or V of a layer is kept: as numbers, in 8-bit floats, or as codes with a scale for each head's vector.

Source of the 8-bit floats: OCP 8-bit Floating Point Specification, revision 1.0 (2023).
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..expand import E4M3
from .quant import DTYPES

E5M2 = (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float64)
FLOATS = {"f8_e4m3": E4M3[:0x7F].astype(np.float64), "f8_e5m2": E5M2[:0x7C]}  # code -> value, finite ones from 0 on
KV_DTYPES = (*DTYPES, *FLOATS, "i8")


@dataclass(frozen=True)
class Plain:
    """values: [pages, page_size, kv_heads, head_dim]."""

    values: np.ndarray

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        """All memory, pages first."""
        return (self.values,)

    def put(self, at: tuple[np.ndarray, np.ndarray], x: np.ndarray) -> None:
        """x [T, kv_heads, d] at pages and offsets in them."""
        self.values[at] = x

    def get(self, pages: np.ndarray) -> np.ndarray:
        """[n, page_size, kv_heads, d] in float64."""
        return self.values[pages].astype(np.float64)


@dataclass(frozen=True)
class SmallFloats:
    """codes: uint8, of the values divided by `scale`; the sign is the highest bit. table: values of codes from 0 on."""

    codes: np.ndarray
    table: np.ndarray
    scale: float

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        return (self.codes,)

    def put(self, at: tuple[np.ndarray, np.ndarray], x: np.ndarray) -> None:
        """The nearest value, the even code of two; beyond the largest the largest."""
        size = np.abs(x) / self.scale
        middles = (self.table[1:] + self.table[:-1]) / 2
        code = np.searchsorted(middles, size)
        tie = middles[np.minimum(code, len(middles) - 1)] == size
        self.codes[at] = code + (tie & (code % 2 == 1)) + 128 * np.signbit(x)

    def get(self, pages: np.ndarray) -> np.ndarray:
        codes = self.codes[pages]
        return np.where(codes & 128, -self.scale, self.scale) * self.table[codes & 127]


@dataclass(frozen=True)
class Int8:
    """values = codes * scale, one float32 scale [pages, page_size, kv_heads] for each head's vector: its largest is
    127."""

    codes: np.ndarray
    scales: np.ndarray

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        return self.codes, self.scales

    def put(self, at: tuple[np.ndarray, np.ndarray], x: np.ndarray) -> None:
        scale = (np.abs(x).max(axis=-1) / 127).astype(np.float32)
        self.codes[at] = np.rint(x / np.where(scale == 0, 1, scale)[..., None])
        self.scales[at] = scale

    def get(self, pages: np.ndarray) -> np.ndarray:
        return self.codes[pages] * self.scales[pages][..., None].astype(np.float64)


Kept = Plain | SmallFloats | Int8


def allocate(dtype: str, shape: tuple[int, ...], scale: float) -> Kept:
    """Zeros [pages, page_size, kv_heads, head_dim] in one of `KV_DTYPES`. scale: of 8-bit floats."""
    if dtype in FLOATS:
        return SmallFloats(np.zeros(shape, np.uint8), FLOATS[dtype], scale)
    if dtype == "i8":
        return Int8(np.zeros(shape, np.int8), np.zeros(shape[:-1], np.float32))
    return Plain(np.zeros(shape, DTYPES[dtype]))
