"""Tensors in the formats of checkpoints, made of random codes, and their values in float64.

The decoders go from value to value as the block layouts say, for all blocks at once: slow, obvious, and shared with no
platform. Sources: ggml's block structures (`ggml-common.h`) for GGUF's formats; `mlx.core.quantize` for affine groups.
"""
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..core.platform import RawTensor
from . import schemes

# Bytes [blocks, bytes of a block], widened so that shifts lose nothing -> the block's values, one array per position.
Columns = list[np.ndarray]


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest values that `dtype` and float32 hold, in float64."""
    x = np.asarray(x, np.float32)
    if dtype == "bf16":
        bits = x.view(np.uint32)
        x = ((bits + 0x7fff + (bits >> 16 & 1)) & np.uint32(0xffff0000)).view(np.float32)
    if dtype == "f16":
        with np.errstate(over="ignore"):  # what it cannot hold is infinite
            x = x.astype(np.float16)
    return x.astype(np.float64)


def rounding(bf16: float, bits: int) -> float:
    """The mean squared error that a type with `bits` bits of significand makes where bf16, which has 8, makes `bf16`:
    each bit more halves every error."""
    return bf16 * 4.0 ** (8 - bits)


def plain(x: np.ndarray) -> RawTensor:
    """A float32 tensor of a checkpoint."""
    return RawTensor("f32", x.shape, np.ascontiguousarray(x, "<f4").view(np.uint8).reshape(-1))


def half(b: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of every block."""
    return (b[:, at] | b[:, at + 1] << 8).astype("<u2").view("<f2").astype(np.float64)


def signed(byte: np.ndarray) -> np.ndarray:
    return np.where(byte < 128, byte, byte - 256)


def nibble(b: np.ndarray, start: int, i: int) -> np.ndarray:
    """Code i of 32 in the 16 bytes from `start`: low halves first, then high halves."""
    return b[:, start + i % 16] >> 4 * (i // 16) & 15


def bit(b: np.ndarray, start: int, i: int) -> np.ndarray:
    return b[:, start + i // 8] >> i % 8 & 1


def q4_0(b: np.ndarray) -> Columns:
    return [half(b, 0) * (nibble(b, 2, i) - 8) for i in range(32)]


def q4_1(b: np.ndarray) -> Columns:
    return [half(b, 0) * nibble(b, 4, i) + half(b, 2) for i in range(32)]


def q5_0(b: np.ndarray) -> Columns:
    return [half(b, 0) * (nibble(b, 6, i) + 16 * bit(b, 2, i) - 16) for i in range(32)]


def q5_1(b: np.ndarray) -> Columns:
    return [half(b, 0) * (nibble(b, 8, i) + 16 * bit(b, 4, i)) + half(b, 2) for i in range(32)]


def q8_0(b: np.ndarray) -> Columns:
    return [half(b, 0) * signed(b[:, 2 + i]) for i in range(32)]


def six_bits(b: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum of group 0 .. 7 of a Q4_K or Q5_K block, of 6 bits each in bytes 4 .. 15."""
    if group < 4:
        return b[:, 4 + group] & 63, b[:, 8 + group] & 63
    low, scale_top, minimum_top = b[:, 8 + group], b[:, group] >> 6, b[:, 4 + group] >> 6
    return low & 15 | scale_top << 4, low >> 4 | minimum_top << 4


def q4_k(b: np.ndarray) -> Columns:
    """Groups 2n and 2n + 1 of 32 are the low and the high halves of the same 32 bytes."""
    out = []
    for group in range(8):
        scale, minimum = six_bits(b, group)
        for i in range(32):
            code = b[:, 16 + 32 * (group // 2) + i] >> 4 * (group % 2) & 15
            out.append(half(b, 0) * scale * code - half(b, 2) * minimum)
    return out


def q5_k(b: np.ndarray) -> Columns:
    """As Q4_K, with a fifth bit for group g in bit g of 32 bytes."""
    out = []
    for group in range(8):
        scale, minimum = six_bits(b, group)
        for i in range(32):
            code = b[:, 48 + 32 * (group // 2) + i] >> 4 * (group % 2) & 15
            code = code + 16 * (b[:, 16 + i] >> group & 1)
            out.append(half(b, 0) * scale * code - half(b, 2) * minimum)
    return out


def q6_k(b: np.ndarray) -> Columns:
    """Two halves of 128; in each, four runs of 32: low and high nibbles of 64 bytes, two bits more from 32 bytes."""
    out = []
    for i in range(256):
        part, run, at = i // 128, i % 128 // 32, i % 32
        low = b[:, 64 * part + 32 * (run % 2) + at] >> 4 * (run // 2) & 15
        high = b[:, 128 + 32 * part + at] >> 2 * run & 3
        out.append(half(b, 208) * signed(b[:, 192 + i // 16]) * ((low | high << 4) - 32))
    return out


def q2_k(b: np.ndarray) -> Columns:
    """Groups of 16 with 4-bit scale and minimum in bytes 0 .. 15; codes of 2 bits, runs of 32 in the same bytes."""
    out = []
    for i in range(256):
        part, run, at, factors = i // 128, i % 128 // 32, i % 32, b[:, i // 16]
        code = b[:, 16 + 32 * part + at] >> 2 * run & 3
        out.append(half(b, 80) * (factors & 15) * code - half(b, 82) * (factors >> 4))
    return out


def q3_k(b: np.ndarray) -> Columns:
    """As Q2_K, a third bit from bytes 0 .. 31, and 6-bit scales: low nibbles in 8 bytes, two bits more in 4."""
    out = []
    for i in range(256):
        part, run, at, group = i // 128, i % 128 // 32, i % 32, i // 16
        code = b[:, 32 + 32 * part + at] >> 2 * run & 3
        high = b[:, at] >> (4 * part + run) & 1
        scale = b[:, 96 + group % 8] >> 4 * (group // 8) & 15 | (b[:, 104 + group % 4] >> 2 * (group // 4) & 3) << 4
        out.append(half(b, 108) * (scale - 32) * ((code | high << 2) - 4))
    return out


# name -> values in a block, bytes of it, where its float16 factors lie, decoder.
BLOCKS: dict[str, tuple[int, int, tuple[int, ...], Callable[[np.ndarray], Columns]]] = {
    "q4_0": (32, 18, (0,), q4_0), "q4_1": (32, 20, (0, 2), q4_1), "q5_0": (32, 22, (0,), q5_0),
    "q5_1": (32, 24, (0, 2), q5_1), "q8_0": (32, 34, (0,), q8_0), "q2_k": (256, 84, (80, 82), q2_k),
    "q3_k": (256, 110, (108,), q3_k), "q4_k": (256, 144, (0, 2), q4_k), "q5_k": (256, 176, (0, 2), q5_k),
    "q6_k": (256, 210, (208,), q6_k)}
PLAIN = {"f64": "<f8", "f32": "<f4", "f16": "<f2", "bf16": "<f4"}


def decode(name: str, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Values in float64 of a block format's bytes, of logical `shape`."""
    _, nbytes, _, columns = BLOCKS[name]
    return np.stack(columns(data.reshape(-1, nbytes).astype(np.int64)), axis=-1).reshape(shape).astype(np.float64)


def quantized(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[RawTensor, np.ndarray]:
    """A tensor of random codes with sane scales in any format, and its values in float64."""
    if name in PLAIN:
        values = rounded(rng.normal(size=shape), "bf16") if name == "bf16" else rng.normal(size=shape).astype("<f2")
        data = np.ascontiguousarray(values, PLAIN[name])
        data = (data.view("<u4") >> 16).astype("<u2") if name == "bf16" else data
        return RawTensor(name, shape, data.view(np.uint8).reshape(-1)), values.astype(np.float64)
    if name.startswith("affine"):
        return affine(rng, name, shape)
    if name.startswith(schemes.PREFIXES):
        return schemes.quantized(rng, name, shape)
    length, nbytes, factors, _ = BLOCKS[name]
    blocks = rng.integers(0, 256, (math.prod(shape) // length, nbytes), dtype=np.uint8)
    for at in factors:
        halves = (rng.uniform(0.5, 2, len(blocks)) * 0.01).astype("<f2")
        blocks[:, at:at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return RawTensor(name, shape, blocks.reshape(-1)), decode(name, blocks, shape)


def affine(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[RawTensor, np.ndarray]:
    """"affine4_32": w = scale * code + bias in groups of 32 along the last axis; bit i of code j is bit j * 4 + i of
    its row, counted from the lowest bit of little-endian words. Scales and biases in float16 beside the codes."""
    bits, group = map(int, name.removeprefix("affine").split("_"))
    codes = rng.integers(0, 1 << bits, shape)
    spread = (codes[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(*shape[:-1], -1)
    data = np.packbits(spread, axis=-1, bitorder="little")
    groups = (*shape[:-1], shape[-1] // group)
    scale, bias = (rng.uniform(0.5, 2, groups) * 0.01).astype("<f2"), (rng.normal(size=groups) * 0.05).astype("<f2")
    beside = tuple(RawTensor("f16", groups, part.view(np.uint8).reshape(-1)) for part in (scale, bias))
    wide = [np.repeat(part.astype(np.float64), group, axis=-1) for part in (scale, bias)]
    return RawTensor(name, shape, data.reshape(-1), beside), wide[0] * codes + wide[1]
