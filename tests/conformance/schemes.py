"""Matrices in the formats of quantized Hugging Face checkpoints, made of random codes, and their values in float64.

Each is written code by code as its library packs it: slow, obvious, and shared with no platform. Sources: AutoAWQ's
`WQLinear_GEMM`, AutoGPTQ's `QuantLinear`, the compressors of compressed-tensors, DeepSeek-V3's `weight_scale_inv`, and
the OCP Microscaling specification.
"""
from __future__ import annotations

import numpy as np

from ..core.platform import RawTensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each 4 bits of a word, the lowest first
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FORMATS = ("awq4", *(f"gptq{bits}{version}" for bits in (2, 3, 4, 8) for version in ("", "_v2")),
           *(f"gptq{bits}{version}_act" for bits in (4, 8) for version in ("", "_v2")),
           *(f"pack{bits}{zeros}{order}" for bits in (4, 8) for zeros in ("", "_asym") for order in ("", "_act")),
           "int8", "fp8", "fp8_128", "mxfp4", "nvfp4", "nvfp4_div")
PREFIXES = ("awq", "gptq", "pack", "int8", "fp8", "mxfp4", "nvfp4")
GROUP = 32


def raw(dtype: str, x: np.ndarray, shape: tuple[int, ...] | None = None, extra: tuple = ()) -> RawTensor:
    return RawTensor(dtype, x.shape if shape is None else shape, np.ascontiguousarray(x).view(np.uint8).reshape(-1),
                     extra)


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [n, m] -> [ceil(n * bits / 32), m] int32: bit k of code i is bit i * bits + k of its column's stream."""
    out = np.zeros((-(-len(codes) * bits // 32), codes.shape[1]), np.uint32)
    for i, row in enumerate(codes):
        for k in range(bits):
            out[(i * bits + k) // 32] |= (row.astype(np.uint32) >> k & 1) << np.uint32((i * bits + k) % 32)
    return out.view(np.int32)


def awq_words(codes: np.ndarray) -> np.ndarray:
    """Codes [n, m] of 4 bits -> [n, m / 8] int32."""
    out = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for i, column in enumerate(AWQ_ORDER):
        out |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * i)
    return out.view(np.int32)


def e4m3(code: int) -> float:
    code = int(code)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0 ** -9
    return -value if code & 128 else value


def matrix(rng: np.random.Generator, name: str, shape: tuple[int, int]) -> tuple[RawTensor, np.ndarray]:
    """A tensor of random codes in a scheme's format, and its values in float64."""
    if name.startswith(("awq", "gptq", "pack")):
        return integers(rng, name, shape)
    height, width = shape
    if name == "int8":
        codes, scale = rng.integers(-128, 128, shape).astype(np.int8), scales(rng, (height, 1))
        return raw(name, codes, shape, (raw("f16", scale),)), codes * scale.astype(float)
    if name.startswith("fp8"):
        codes = rng.integers(0, 256, shape).astype(np.uint8)
        codes[codes & 127 == 127] = 0  # not a number
        block = (128, 128) if name == "fp8_128" else (1, width)
        scale = scales(rng, (-(-height // block[0]), -(-width // block[1]))).astype(np.float32) / 100
        wide = np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[:height, :width]
        return raw(name, codes, shape, (raw("f32", scale),)), np.vectorize(e4m3)(codes) * wide.astype(float)
    return fours(rng, name, shape)


def fours(rng: np.random.Generator, name: str, shape: tuple[int, int]) -> tuple[RawTensor, np.ndarray]:
    """Two codes to a byte, the first in the low half."""
    codes = rng.integers(0, 16, shape)
    values = np.array([*E2M1, *(-x for x in E2M1)])[codes]
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    block = 32 if name == "mxfp4" else 16
    groups = (shape[0], shape[1] // block)
    if name == "mxfp4":
        exponents = rng.integers(118, 124, groups).astype(np.uint8)
        return (raw(name, packed, shape, (raw("f8_e8m0", exponents),)),
                values * np.repeat(2.0 ** (exponents.astype(int) - 127), block, 1))
    bytes_ = rng.integers(40, 80, groups).astype(np.uint8)
    whole = np.float32(0.003 if name == "nvfp4" else 300)
    scale = np.vectorize(e4m3)(bytes_) * (float(whole) if name == "nvfp4" else 1 / float(whole))
    return (raw(name, packed, shape, (raw("f8_e4m3", bytes_), raw("f32", np.array(whole)))),
            values * np.repeat(scale, block, 1))


def scales(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (rng.uniform(0.5, 2, shape) * 0.01).astype(np.float16)


def integers(rng: np.random.Generator, name: str, shape: tuple[int, int]) -> tuple[RawTensor, np.ndarray]:
    """w = scale * (code - zero)."""
    height, width = shape
    family = next(prefix for prefix in PREFIXES if name.startswith(prefix))
    bits = int(name[len(family)])
    groups = width // GROUP
    codes, scale = rng.integers(0, 1 << bits, shape), scales(rng, (height, groups))
    middle = 1 << (bits - 1)
    zero = np.full((height, groups), middle)
    if family != "pack" or "_asym" in name:
        zero = rng.integers(max(1, middle - 2), min((1 << bits) - 1, middle + 2), (height, groups))
    order = np.repeat(np.arange(groups), GROUP).astype(np.int32)
    if name.endswith("_act"):
        order = rng.permutation(order)
    extra = (raw("i32", order),) if name.endswith("_act") else ()
    if family == "pack":
        data = words(codes.T, bits).T
        extra = (raw("i32", words(zero, bits)),) * ("_asym" in name) + extra
        first = raw("f16", scale)
    else:
        stored = zero - (0 if family == "awq" or "_v2" in name else 1)
        data = awq_words(codes.T) if family == "awq" else words(codes.T, bits)
        extra = (raw("i32", awq_words(stored.T) if family == "awq" else words(stored, bits).T), *extra)
        first = raw("f16", scale.T)
    return raw(name, data, shape, (first, *extra)), scale.astype(float)[:, order] * (codes - zero[:, order])


def quantized(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[RawTensor, np.ndarray]:
    """A matrix, or that of each expert, one after the other."""
    if len(shape) == 2:
        return matrix(rng, name, shape)
    parts, values = zip(*(matrix(rng, name, shape[1:]) for _ in range(shape[0])), strict=True)
    return stacked(parts), np.stack(values)


def stacked(parts: tuple[RawTensor, ...]) -> RawTensor:
    """One tensor with the parts along a new first axis, and so what lies beside them."""
    extras = tuple(map(stacked, zip(*(part.extra for part in parts), strict=True)))
    return RawTensor(parts[0].dtype, (len(parts), *parts[0].shape), np.concatenate([part.data for part in parts]),
                     extras)
