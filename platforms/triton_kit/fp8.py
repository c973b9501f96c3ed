"""Eight-bit floats by integer arithmetic, inside kernels, for devices (and the interpreter) without exact native casts.

sm_80 has no e4m3 at all, gfx942 only the fnuz kind, gfx1100 none. The bits of e4m3 and e5m2 are the upper bits of a
half float up to a power of two, so a read costs two shifts and the power of two goes into the tensor's scale.
Format: Micikevicius et al. 2022, FP8 Formats for Deep Learning.
"""
from __future__ import annotations

import triton
import triton.language as tl

DECODE_FACTOR = {"e4m3": 256.0, "e5m2": 1.0}  # value = factor * what `decode` returns; other formats: 1


@triton.jit
def decode(x, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Stored elements as `dtype`: bytes of "e4m3" or "e5m2" (see DECODE_FACTOR), or anything else by a cast."""
    if FORMAT == "e4m3":
        bits = x.to(tl.uint16)
        y = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)
    elif FORMAT == "e5m2":
        y = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def encode(x, FORMAT: tl.constexpr):
    """float32 to the bytes of "e4m3" or "e5m2": nearest, ties to even, beyond the largest value the largest."""
    if FORMAT == "e4m3":
        MANTISSA: tl.constexpr = 3
        BIAS: tl.constexpr = 7
        LARGEST: tl.constexpr = 448.0
    else:
        MANTISSA: tl.constexpr = 2
        BIAS: tl.constexpr = 15
        LARGEST: tl.constexpr = 57344.0
    DROPPED: tl.constexpr = 23 - MANTISSA
    size = tl.minimum(tl.abs(x), LARGEST)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal number a step is constant: adding 2^23 makes the addition round to whole steps.
    steps = (size * (1 << (BIAS - 1 + MANTISSA)) + 8388608.0).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(size < 2.0 ** (1 - BIAS), steps, normal)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return (sign | code).to(tl.uint8)
