"""Weights: a dense leaf, and a leaf that keeps the checkpoint's codes in affine groups of 32."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.platform import RawTensor, Unsupported, WeightSpec
from ..expand import CODECS, affine, expand

DTYPES = {"f64": np.float64, "f32": np.float32}
KEPT = ("q4_0", "q4_1", "q8_0")
GROUP = 32


@dataclass(frozen=True)
class Dense:
    """[out, in] values, or [experts, out, in], or a vector, in the compute dtype."""

    values: np.ndarray

    def product(self, x: np.ndarray) -> np.ndarray:
        """[T, in] -> [T, out]: x @ w.T."""
        return x @ self.values.T

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """[n] row numbers -> [n, in]."""
        return self.values[ids]

    def expert(self, number: int) -> Dense:
        return Dense(self.values[number])

    def __str__(self) -> str:
        return f"{self.values.dtype}"


@dataclass(frozen=True)
class QuantLinear:
    """w = scale * code + minimum, one scale and minimum per group of 32 along the input axis.

    codes [..., out, in] integers; scale and minimum [..., out, in / 32] in the compute dtype.
    """

    codes: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray

    def product(self, x: np.ndarray) -> np.ndarray:
        """[T, in] -> [T, out], group by group: x . w = scale * (x . code) + minimum * sum(x)."""
        out = np.zeros((len(x), len(self.codes)), x.dtype)
        for group in range(self.scale.shape[-1]):
            part = slice(group * GROUP, (group + 1) * GROUP)
            codes = self.codes[:, part].astype(x.dtype)
            out += (x[:, part] @ codes.T) * self.scale[:, group]
            out += x[:, part].sum(axis=1, keepdims=True) * self.minimum[:, group]
        return out

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """[n] row numbers -> [n, in] values."""
        scale, minimum = (np.repeat(part[ids], GROUP, axis=-1) for part in (self.scale, self.minimum))
        return scale * self.codes[ids] + minimum

    def expert(self, number: int) -> QuantLinear:
        return QuantLinear(self.codes[number], self.scale[number], self.minimum[number])

    def __str__(self) -> str:
        return f"codes of {self.codes.dtype}, groups of {GROUP}"


Leaf = Dense | QuantLinear


def load_weight(raws: Sequence[RawTensor], spec: WeightSpec, dtype: str) -> Leaf:
    """The leaf of one weight, its parts stacked along the output axis. Copies: the bytes may go away afterwards.

    Kept as codes when every part has a format of `KEPT`, otherwise expanded to `dtype`.
    """
    if dtype not in DTYPES:
        raise Unsupported(f"compute dtype {dtype!r}: the reference computes in {' or '.join(DTYPES)}")
    unknown = sorted({raw.dtype for raw in raws} - CODECS.keys())
    if unknown:
        raise Unsupported(f"{spec.names[0]}: format {', '.join(unknown)} is unknown; known: {', '.join(CODECS)}")
    axis = 1 if spec.role == "experts" else 0
    if all(raw.dtype in KEPT for raw in raws):
        codes, scale, minimum = (np.concatenate(parts, axis) for parts in zip(*map(affine, raws), strict=True))
        return QuantLinear(codes, scale.astype(DTYPES[dtype]), minimum.astype(DTYPES[dtype]))
    return Dense(np.concatenate([expand(raw).astype(DTYPES[dtype], copy=False) for raw in raws], axis))
