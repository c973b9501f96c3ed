"""Weights: a dense leaf, a leaf that keeps the checkpoint's codes in affine groups, and experts, each one of these."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.platform import RawTensor, Unsupported, WeightSpec
from ..expand import CODECS, INTEGERS, PACKED, affine, expand, group_of
from ..experts import by_expert

DTYPES = {"f64": np.float64, "f32": np.float32}
KEPT = ("q4_0", "q4_1", "q8_0", *PACKED, *INTEGERS)


@dataclass(frozen=True)
class Dense:
    """[out, in] values, or a vector, in the compute dtype."""

    values: np.ndarray

    def product(self, x: np.ndarray) -> np.ndarray:
        """[T, in] -> [T, out]: x @ w.T."""
        return x @ self.values.T

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """[n] row numbers -> [n, in]."""
        return self.values[ids]

    def __str__(self) -> str:
        return f"{self.values.dtype}"


@dataclass(frozen=True)
class QuantLinear:
    """w = scale * code + minimum, one scale and minimum per group along the input axis.

    codes [out, in] integers; scale and minimum [out, in / group] in the compute dtype.
    """

    codes: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scale.shape[1]

    def product(self, x: np.ndarray) -> np.ndarray:
        """[T, in] -> [T, out], group by group: x . w = scale * (x . code) + minimum * sum(x)."""
        out = np.zeros((len(x), len(self.codes)), x.dtype)
        for group in range(self.scale.shape[1]):
            part = slice(group * self.group, (group + 1) * self.group)
            codes = self.codes[:, part].astype(x.dtype)
            out += (x[:, part] @ codes.T) * self.scale[:, group]
            out += x[:, part].sum(axis=1, keepdims=True) * self.minimum[:, group]
        return out

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """[n] row numbers -> [n, in] values."""
        scale, minimum = (np.repeat(part[ids], self.group, axis=-1) for part in (self.scale, self.minimum))
        return scale * self.codes[ids] + minimum

    def __str__(self) -> str:
        return f"codes of {self.codes.dtype}, groups of {self.group}"


@dataclass(frozen=True)
class Experts:
    """One matrix for each expert."""

    parts: tuple[Dense | QuantLinear, ...]

    def expert(self, number: int) -> Dense | QuantLinear:
        return self.parts[number]

    def __str__(self) -> str:
        return f"{len(self.parts)} experts, {self.parts[0]}"


Leaf = Dense | QuantLinear | Experts


def load_weight(raws: Sequence[RawTensor], spec: WeightSpec, dtype: str) -> Leaf:
    """The leaf of one weight, its parts stacked along the output axis. Copies: the bytes may go away afterwards.

    Kept as codes when every part has a format of `KEPT` and the same group, otherwise expanded to `dtype`.
    """
    if dtype not in DTYPES:
        raise Unsupported(f"compute dtype {dtype!r}: the reference computes in {' or '.join(DTYPES)}")
    unknown = sorted({raw.dtype for raw in raws} - CODECS.keys())
    if unknown:
        raise Unsupported(f"{spec.names[0]}: format {', '.join(unknown)} is unknown; known: {', '.join(CODECS)}")
    if spec.role == "experts":
        return Experts(tuple(_stacked(parts, dtype) for parts in by_expert(raws, spec)))
    return _stacked(raws, dtype)


def _stacked(raws: Sequence[RawTensor], dtype: str) -> Dense | QuantLinear:
    if all(raw.dtype in KEPT for raw in raws) and len({group_of(raw) for raw in raws}) == 1:
        codes, scale, minimum = (np.concatenate(parts) for parts in zip(*map(affine, raws), strict=True))
        return QuantLinear(codes, scale.astype(DTYPES[dtype]), minimum.astype(DTYPES[dtype]))
    return Dense(np.concatenate([expand(raw).astype(DTYPES[dtype], copy=False) for raw in raws]))
