"""Checkpoint formats expanded to float32 with numpy, for the formats that a platform has no kernel for.

Block layouts: the GGUF specification and the block structures of ggml (`ggml-common.h`), and `mlx.core.quantize`; every
decoder gives exactly the value that those define, in float32 arithmetic.
"""
from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import NamedTuple

import numpy as np

from ..core.platform import RawTensor, Unsupported

CHUNK = 1 << 21  # elements decoded at once: bounds the temporaries to a few tens of megabytes


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block, [blocks, 1] float32."""
    return blocks[:, at:at + 2].copy().view("<f2").astype(np.float32)


def _fields(packed: np.ndarray, bits: int) -> np.ndarray:
    """[..., n] bytes -> [..., 8 / bits, n]: every byte's fields of `bits` bits, the lowest first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)


def _nibbles(blocks: np.ndarray, at: int) -> np.ndarray:
    """16 bytes of a 32-element block: low halves first, then high halves. [blocks, 32] uint8."""
    return _fields(blocks[:, at:at + 16], 4).reshape(-1, 32)


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """The 32 single bits of a 5-bit block, moved to bit 4."""
    return np.unpackbits(blocks[:, at:at + 4], axis=1, bitorder="little") << np.uint8(4)


# Groups: codes, scale and minimum of w = scale * code + minimum.

Affine = tuple[np.ndarray, np.ndarray, np.ndarray]


def _affine_q4_0(blocks: np.ndarray) -> Affine:
    scale = _half(blocks, 0)
    return _nibbles(blocks, 2), scale, np.float32(-8) * scale


def _affine_q4_1(blocks: np.ndarray) -> Affine:
    return _nibbles(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _affine_q5_0(blocks: np.ndarray) -> Affine:
    scale = _half(blocks, 0)
    return _nibbles(blocks, 6) | _fifth_bits(blocks, 2), scale, np.float32(-16) * scale


def _affine_q5_1(blocks: np.ndarray) -> Affine:
    return _nibbles(blocks, 8) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _affine_q8_0(blocks: np.ndarray) -> Affine:
    scale = _half(blocks, 0)
    return blocks[:, 2:].view(np.int8), scale, np.zeros_like(scale)


def _six_bit_pairs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes of Q4_K and Q5_K -> 8 scales and 8 minimums of 6 bits, [blocks, 8, 1] each."""
    first, second, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = np.concatenate([first & 63, (rest & 15) | (first >> 6 << 4)], axis=1)
    minimum = np.concatenate([second & 63, (rest >> 4) | (second >> 6 << 4)], axis=1)
    return scale[:, :, None], minimum[:, :, None]


def _scaled_pairs(blocks: np.ndarray, codes: np.ndarray) -> Affine:
    """Codes [blocks, 8, 32] of Q4_K and Q5_K with their scales and minimums."""
    scale, minimum = _six_bit_pairs(blocks[:, 4:16])
    return codes, _half(blocks, 0)[:, :, None] * scale, -(_half(blocks, 2)[:, :, None] * minimum)


def _affine_q4_k(blocks: np.ndarray) -> Affine:
    return _scaled_pairs(blocks, _fields(blocks[:, 16:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32))


def _affine_q5_k(blocks: np.ndarray) -> Affine:
    low = _fields(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    high = _fields(blocks[:, 16:48], 1)
    return _scaled_pairs(blocks, low | (high << np.uint8(4)))


def _affine_packed(bits: int) -> Callable[[np.ndarray, np.ndarray, np.ndarray], Affine]:
    """MLX: codes in one stream of bits, the lowest first, whole ones in every 1, 3 or 5 bytes; the rest lies beside."""
    size = bits // gcd(bits, 8)
    kind = np.uint8 if size == 1 else np.uint64 if size > 4 else np.uint32
    shifts = np.arange(0, 8 * size, bits, dtype=kind)

    def decode(blocks: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> Affine:
        packs = blocks.reshape(len(blocks), -1, size)
        words = sum(packs[..., i].astype(kind) << kind(8 * i) for i in range(size))
        codes = (words[..., None] >> shifts & kind((1 << bits) - 1)).astype(np.uint8)
        return codes.reshape(len(blocks), -1), scale, bias
    return decode


def _expand_affine(decode: Callable[..., Affine]) -> Callable[..., np.ndarray]:
    def expand_blocks(blocks: np.ndarray, *beside: np.ndarray) -> np.ndarray:
        codes, scale, minimum = decode(blocks, *beside)
        return codes * scale + minimum
    return expand_blocks


# Blocks of 256 in groups of 16, whose scales are themselves quantized.

def _expand_q6_k(blocks: np.ndarray) -> np.ndarray:
    low = _fields(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 16, 16)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    codes = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    scale = blocks[:, 192:208].view(np.int8)[:, :, None]
    return _half(blocks, 208)[:, :, None] * scale * codes


def _expand_q2_k(blocks: np.ndarray) -> np.ndarray:
    codes = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    scale, minimum = blocks[:, :16, None] & 15, blocks[:, :16, None] >> 4
    return _half(blocks, 80)[:, :, None] * scale * codes - _half(blocks, 82)[:, :, None] * minimum


def _expand_q3_k(blocks: np.ndarray) -> np.ndarray:
    low = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    high = _fields(blocks[:, :32], 1).reshape(-1, 16, 16)
    codes = (low | (high << np.uint8(2))).view(np.int8) - np.int8(4)
    scale_low = _fields(blocks[:, 96:104], 4).reshape(-1, 16)
    scale_high = _fields(blocks[:, 104:108], 2).reshape(-1, 16)
    scale = (scale_low | (scale_high << np.uint8(4))).view(np.int8) - np.int8(32)
    return _half(blocks, 108)[:, :, None] * scale[:, :, None] * codes


def _expand_bf16(values: np.ndarray) -> np.ndarray:
    return (values.view("<u2").astype(np.uint32) << 16).view(np.float32)


class Codec(NamedTuple):
    """Elements and bytes of one block, and the decoder of uint8 [blocks, bytes] to values in order; it also gets the
    `beside` tensors of `RawTensor.extra`, float32 [blocks, 1] each."""

    elements: int
    nbytes: int
    expand: Callable[..., np.ndarray]
    beside: int = 0


PACKED = {f"affine{bits}_{group}": (bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)}

AFFINE = {"q4_0": _affine_q4_0, "q4_1": _affine_q4_1, "q5_0": _affine_q5_0, "q5_1": _affine_q5_1, "q8_0": _affine_q8_0,
          "q4_k": _affine_q4_k, "q5_k": _affine_q5_k,
          **{name: _affine_packed(bits) for name, (bits, _) in PACKED.items()}}

CODECS = {
    "f64": Codec(1, 8, lambda values: values.view("<f8")),
    "f32": Codec(1, 4, lambda values: values.view("<f4")),
    "f16": Codec(1, 2, lambda values: values.view("<f2")),
    "bf16": Codec(1, 2, _expand_bf16),
    "q4_0": Codec(32, 18, _expand_affine(_affine_q4_0)),
    "q4_1": Codec(32, 20, _expand_affine(_affine_q4_1)),
    "q5_0": Codec(32, 22, _expand_affine(_affine_q5_0)),
    "q5_1": Codec(32, 24, _expand_affine(_affine_q5_1)),
    "q8_0": Codec(32, 34, _expand_affine(_affine_q8_0)),
    "q2_k": Codec(256, 84, _expand_q2_k),
    "q3_k": Codec(256, 110, _expand_q3_k),
    "q4_k": Codec(256, 144, _expand_affine(_affine_q4_k)),
    "q5_k": Codec(256, 176, _expand_affine(_affine_q5_k)),
    "q6_k": Codec(256, 210, _expand_q6_k),
    **{name: Codec(group, group * bits // 8, _expand_affine(AFFINE[name]), 2)
       for name, (bits, group) in PACKED.items()},
}


def _blocks(raw: RawTensor) -> tuple[Codec, list[np.ndarray]]:
    """The codec of a tensor, its bytes as [blocks, bytes of a block] (a view), and what lies beside as [blocks, 1]."""
    codec = CODECS.get(raw.dtype)
    if codec is None:
        raise Unsupported(f"format {raw.dtype!r} cannot be expanded; known: {', '.join(CODECS)}")
    count, rest = divmod(int(np.prod(raw.shape, dtype=np.int64)), codec.elements)
    data = np.frombuffer(raw.data, np.uint8)
    if rest or (raw.shape and raw.shape[-1] % codec.elements):
        raise ValueError(f"{raw.dtype} tensor of shape {raw.shape}: the last axis is no multiple of {codec.elements}")
    if data.size != count * codec.nbytes:
        raise ValueError(f"{raw.dtype} tensor of shape {raw.shape} takes {count * codec.nbytes} bytes, not {data.size}")
    groups = [(*raw.shape[:-1], raw.shape[-1] // codec.elements)] * codec.beside if codec.beside else []
    if [extra.shape for extra in raw.extra] != groups:
        raise ValueError(f"{raw.dtype} tensor of shape {raw.shape} needs beside it {groups or 'nothing'}, not "
                         f"{[extra.shape for extra in raw.extra]}")
    return codec, [data.reshape(count, codec.nbytes), *(expand(extra).reshape(-1, 1) for extra in raw.extra)]


def expand(raw: RawTensor) -> np.ndarray:
    """The tensor's values as a new float32 array of `raw.shape` (float64 is rounded).

    Raises `Unsupported` for an unknown format, `ValueError` for bytes, or tensors beside, that do not fit the shape.
    """
    codec, blocks = _blocks(raw)
    out = np.empty((len(blocks[0]), codec.elements), np.float32)
    step = CHUNK // codec.elements
    for start in range(0, len(out), step):
        part = codec.expand(*(array[start:start + step] for array in blocks))
        out[start:start + step] = part.reshape(-1, codec.elements)
    return out.reshape(raw.shape)


def affine(raw: RawTensor) -> Affine:
    """Exact view of a format of `AFFINE` as w = scale * code + minimum in groups along the last axis.

    Returns codes [..., in] (uint8; int8 for q8_0), scale and minimum [..., in / group] float32; `group_size` tells the
    group. Codes may be a view of the tensor's bytes. Raises `Unsupported` for another format.
    """
    if raw.dtype not in AFFINE:
        raise Unsupported(f"format {raw.dtype!r} has no affine groups; those that have: {', '.join(AFFINE)}")
    codes, scale, minimum = AFFINE[raw.dtype](*_blocks(raw)[1])
    groups = (*raw.shape[:-1], raw.shape[-1] // group_size(raw.dtype))
    return codes.reshape(raw.shape), scale.reshape(groups), minimum.reshape(groups)


def group_size(name: str) -> int:
    """Elements that share a scale and a minimum in a format of `AFFINE`."""
    return PACKED[name][1] if name in PACKED else 32
