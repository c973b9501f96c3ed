"""K and V as a state keeps them: the values that are left in each dtype of `core.specs.KV_FORMATS`, and how far off.

Source of the 8-bit floats: OCP 8-bit Floating Point Specification, revision 1.0 (2023).
"""
from __future__ import annotations

import numpy as np

from .formats import rounded, rounding
from .opcase import NMSE

# dtype -> explicit bits of the fraction, lowest exponent of normal values, largest value.
SMALL = {"f8_e4m3": (3, -6, 448.0), "f8_e5m2": (2, -14, 57344.0)}
# Significand; i8 has steps of 1/127 of a vector's largest value, as good as 6 bits for values of a normal distribution.
BITS = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8, "f8_e4m3": 4, "f8_e5m2": 3, "i8": 6}


def kept(x: np.ndarray, dtype: str) -> np.ndarray:
    """What is read of values x [..., kv_heads, head_dim], in float64: the nearest ones, the even one of two."""
    if dtype == "i8":
        scale = np.abs(x).max(axis=-1, keepdims=True).astype(np.float32).astype(np.float64) / 127
        return np.rint(x / np.where(scale == 0, 1, scale)) * scale
    if dtype not in SMALL:
        return rounded(x, dtype)
    fraction, lowest, largest = SMALL[dtype]
    exponent = np.maximum(np.frexp(x)[1] - 1, lowest)
    step = np.ldexp(1.0, exponent - fraction)
    return np.clip(np.rint(x / step) * step, -largest, largest)


def kv_nmse(compute: str, dtype: str) -> float:
    """Largest error of attention over K and V that the dtype was taken off already: a little more than one rounding to
    it, which whoever multiplies in it does to queries and weights; and no less than the computation's own."""
    return max(NMSE[compute], rounding(NMSE["bf16"] / 8, BITS[dtype]))
