"""Checkpoint formats expanded to float32 with numpy, for the formats that a platform has no kernel for.

Block layouts: the GGUF specification and the block structures of ggml (`ggml-common.h`), and `mlx.core.quantize`; of
the schemes of Hugging Face's checkpoints: `core/quant/formats.py`. Every decoder gives exactly the value that those
define, in float32 arithmetic.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


def _stream(packed: np.ndarray, bits: int) -> np.ndarray:
    """[n, bytes] -> codes [n, bytes * 8 / bits] of one stream of bits, the lowest first: whole ones in every 1, 3 or 5
    bytes."""
    size = bits // gcd(bits, 8)
    kind = np.uint8 if size == 1 else np.uint64 if size > 4 else np.uint32
    whole = np.pad(packed, ((0, 0), (0, -packed.shape[1] % size))) if packed.shape[1] % size else packed
    packs = whole.reshape(len(packed), -1, size)
    words = packs[..., 0] if size == 1 else sum(packs[..., i].astype(kind) << kind(8 * i) for i in range(size))
    codes = np.empty((*words.shape, 8 * size // bits), np.uint8)
    for i in range(codes.shape[-1]):  # code by code: numpy is slow over a short last axis
        codes[..., i] = words >> kind(bits * i) & kind((1 << bits) - 1)
    return codes.reshape(len(packed), -1)


def _affine_packed(bits: int) -> Callable[[np.ndarray, np.ndarray, np.ndarray], Affine]:
    """MLX: codes in one stream; the rest lies beside."""
    return lambda blocks, scale, bias: (_stream(blocks, bits), scale, bias)


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


# Schemes: codes of a whole matrix, with scales of groups along the inputs beside them.

class Scaled(NamedTuple):
    """w = scale * (table[code], or code - zero), a scale and a zero for a group of inputs of `height` outputs.

    codes: [out, in] integers.  scale, zero: float32 [out / height, groups], up.  order: [in] group of each input, None
    where groups are runs of `width` of them.
    """

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None = None
    table: np.ndarray | None = None
    order: np.ndarray | None = None
    height: int = 1
    width: int | None = None

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Values of some outputs, float32."""
        codes = self.codes[start:stop]
        if self.table is not None:
            values = np.take(self.table, codes)
        elif self.zero is None:
            values = codes.astype(np.float32)
        else:
            values = codes - self._wide(self.zero, start, stop)
        values *= self._wide(self.scale, start, stop)
        return values

    def _wide(self, part: np.ndarray, start: int, stop: int) -> np.ndarray:
        """[stop - start, in], or what broadcasts to that."""
        if len(part) > 1:
            part = part[np.arange(start, min(stop, len(self.codes))) // self.height]
        if part.shape[1] == 1:
            return part
        if self.order is not None:
            return np.take(part, self.order, axis=1)
        inputs = self.codes.shape[1]
        return np.repeat(part, self.width or inputs // part.shape[1], axis=1)[:, :inputs]


def _numbers(raw: RawTensor) -> np.ndarray:
    """32-bit words, or group numbers."""
    return np.frombuffer(raw.data, "<i4").reshape(raw.shape)


def _columns(words: np.ndarray, bits: int) -> np.ndarray:
    """Words [words, n] -> codes [n, words * 32 / bits] of the streams down their columns."""
    return _stream(np.ascontiguousarray(words.T).view(np.uint8), bits)


def _awq(raw: RawTensor) -> Scaled:
    def codes(words: np.ndarray) -> np.ndarray:
        """Words [n, words] -> [words * 8, n]."""
        columns = np.ascontiguousarray(words.T).view(np.uint32)
        out = np.empty((len(columns), 8, columns.shape[1]), np.uint8)
        for digit, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            out[:, output] = columns >> np.uint32(4 * digit) & np.uint32(15)
        return out.reshape(-1, columns.shape[1])
    scales, zeros = raw.extra
    words = np.frombuffer(raw.data, "<i4").reshape(raw.shape[1], -1)
    return Scaled(codes(words), expand(scales).T, codes(_numbers(zeros)).astype(np.float32))


def _gptq(bits: int, offset: int, raw: RawTensor) -> Scaled:
    scales, zeros, *order = raw.extra
    codes = _columns(np.frombuffer(raw.data, "<i4").reshape(-1, raw.shape[0]), bits)
    zero = (_stream(_numbers(zeros).view(np.uint8), bits) + np.uint8(offset)) & np.uint8((1 << bits) - 1)
    return Scaled(codes, expand(scales).T, zero.T[:len(codes)].astype(np.float32), None, *map(_numbers, order))


def _pack(bits: int, stored: bool, raw: RawTensor) -> Scaled:
    scales, *rest = raw.extra
    scale = expand(scales)
    zero = np.full((1, 1), 1 << (bits - 1), np.float32)
    if stored:
        zero = _columns(_numbers(rest.pop(0)), bits).T[:len(scale)].astype(np.float32)
    return Scaled(_stream(np.frombuffer(raw.data, np.uint8).reshape(raw.shape[0], -1), bits), scale, zero, None,
                  *map(_numbers, rest))


def _int8(raw: RawTensor) -> Scaled:
    return Scaled(np.frombuffer(raw.data, np.int8).reshape(raw.shape), expand(raw.extra[0]))


def _fp8(raw: RawTensor) -> Scaled:
    blocks = dict(height=128, width=128) if raw.dtype == "fp8_128" else {}
    return Scaled(np.frombuffer(raw.data, np.uint8).reshape(raw.shape), expand(raw.extra[0]), table=E4M3, **blocks)


def _fp4(raw: RawTensor) -> Scaled:
    scale = expand(raw.extra[0])
    if raw.dtype != "mxfp4":
        whole = expand(raw.extra[1]).reshape(1, 1)
        scale = scale * whole if raw.dtype == "nvfp4" else scale / whole
    return Scaled(_stream(np.frombuffer(raw.data, np.uint8).reshape(raw.shape[0], -1), 4), scale, table=E2M1)


def _small_floats(exponent: int, mantissa: int, last: float) -> np.ndarray:
    """Values of all codes of a sign, `exponent` and `mantissa` bits; `last` is the one with all bits set."""
    codes = np.arange(1 << exponent + mantissa)
    power, part = np.maximum(codes >> mantissa, 1), codes & (1 << mantissa) - 1
    whole = np.where(codes >> mantissa, 1 << mantissa, 0) + part
    values = np.ldexp(whole.astype(np.float32), power - (1 << exponent - 1) + 1 - mantissa)
    values[-1] = last
    return np.concatenate([values, -values])


E2M1 = _small_floats(2, 1, 6)
E4M3 = _small_floats(4, 3, np.nan)
E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))

class Scheme(NamedTuple):
    """Bits of a code, how many tensors lie beside the codes, and the decoder of a matrix."""

    bits: int
    beside: int
    decode: Callable[[RawTensor], Scaled]


SCALED = {
    "awq4": Scheme(4, 2, _awq), "int8": Scheme(8, 1, _int8), "fp8": Scheme(8, 1, _fp8), "fp8_128": Scheme(8, 1, _fp8),
    "mxfp4": Scheme(4, 1, _fp4), "nvfp4": Scheme(4, 2, _fp4), "nvfp4_div": Scheme(4, 2, _fp4),
    **{f"gptq{bits}{version}{order}": Scheme(bits, 2 + bool(order), partial(_gptq, bits, not version))
       for bits in (2, 3, 4, 8) for version in ("", "_v2") for order in ("", "_act") if bits in (4, 8) or not order},
    **{f"pack{bits}{zeros}{order}": Scheme(bits, 1 + bool(zeros) + bool(order), partial(_pack, bits, bool(zeros)))
       for bits in (4, 8) for zeros in ("", "_asym") for order in ("", "_act")},
}
# Those that are groups w = scale * code + minimum -> bits of a code.
INTEGERS = {name: scheme.bits for name, scheme in SCALED.items()
            if name.startswith(("awq", "gptq", "pack", "int")) and not name.endswith("_act")}


class Codec(NamedTuple):
    """Elements and bytes of one block, and the decoder of uint8 [blocks, bytes] to values in order; it also gets the
    `beside` tensors of `RawTensor.extra`, float32 [blocks, 1] each. None: a matrix is decoded as `SCALED` says."""

    elements: int
    nbytes: int
    expand: Callable[..., np.ndarray] | None
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
    "f8_e4m3": Codec(1, 1, lambda values: E4M3[values]),
    "f8_e8m0": Codec(1, 1, lambda values: E8M0[values]),
    **{name: Codec(8, scheme.bits, None, scheme.beside) for name, scheme in SCALED.items()},
}


def _matrices(raw: RawTensor) -> list[Scaled]:
    """The matrices of a format of `SCALED`: one, or that of each expert."""
    if len(raw.shape) > 2:
        return [matrix for part in _apart(raw) for matrix in _matrices(part)]
    bits, beside, decode = SCALED[raw.dtype]
    where = f"{raw.dtype} tensor of shape {raw.shape}"
    size, held = np.prod(raw.shape, dtype=np.int64) * bits, memoryview(raw.data).nbytes
    if len(raw.shape) != 2 or held * 8 != size:
        raise ValueError(f"{where} takes {size / 8:g} bytes, not {held}")
    if len(raw.extra) != beside:
        raise ValueError(f"{where} needs {beside} tensors beside it, not {len(raw.extra)}")
    matrix = decode(raw)
    groups = matrix.scale.shape[1]
    if matrix.order is None and matrix.width is None and (groups == 0 or raw.shape[1] % groups):
        raise ValueError(f"{where} has {groups} groups, which do not divide its inputs")
    return [matrix]


def _apart(raw: RawTensor) -> list[RawTensor]:
    """The tensors along the first axis, with what lies beside each."""
    data = np.frombuffer(raw.data, np.uint8).reshape(raw.shape[0], -1)
    extras = [_apart(extra) for extra in raw.extra]
    return [RawTensor(raw.dtype, raw.shape[1:], part, tuple(extra[i] for extra in extras))
            for i, part in enumerate(data)]


def _blocks(raw: RawTensor) -> tuple[Codec, list[np.ndarray]]:
    """The codec of a tensor, its bytes as [blocks, bytes of a block] (a view), and what lies beside as [blocks, 1]."""
    codec = CODECS[raw.dtype]
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
    if raw.dtype not in CODECS:
        raise Unsupported(f"format {raw.dtype!r} cannot be expanded; known: {', '.join(CODECS)}")
    if raw.dtype in SCALED:
        matrices = _matrices(raw)
        out = np.empty((len(matrices), *raw.shape[-2:]), np.float32)
        step = max(1, CHUNK // max(1, raw.shape[-1]))
        for values, matrix in zip(out, matrices, strict=True):
            for start in range(0, len(values), step):
                values[start:start + step] = matrix.rows(start, start + step)
        return out.reshape(raw.shape)
    codec, blocks = _blocks(raw)
    out = np.empty((len(blocks[0]), codec.elements), np.float32)
    step = CHUNK // codec.elements
    for start in range(0, len(out), step):
        part = codec.expand(*(array[start:start + step] for array in blocks))
        out[start:start + step] = part.reshape(-1, codec.elements)
    return out.reshape(raw.shape)


def affine(raw: RawTensor) -> Affine:
    """Exact view of a format of `AFFINE` or `INTEGERS` as w = scale * code + minimum in groups along the last axis.

    Returns codes [..., in] (uint8; int8 for q8_0 and int8), scale and minimum [..., in / group] float32; `group_of`
    tells the group. Codes may be a view of the tensor's bytes. Raises `Unsupported` for another format.
    """
    if raw.dtype in INTEGERS:
        parts = [_affine_integers(matrix) for matrix in _matrices(raw)]
        codes, scale, minimum = (np.stack(part) if len(raw.shape) > 2 else part[0]
                                 for part in zip(*parts, strict=True))
        groups = (*raw.shape[:-1], scale.shape[-1])
        return codes.reshape(raw.shape), scale.reshape(groups), minimum.reshape(groups)
    if raw.dtype not in AFFINE:
        raise Unsupported(f"format {raw.dtype!r} has no affine groups; those that have: "
                          f"{', '.join([*AFFINE, *INTEGERS])}")
    codes, scale, minimum = AFFINE[raw.dtype](*_blocks(raw)[1])
    groups = (*raw.shape[:-1], raw.shape[-1] // group_size(raw.dtype))
    return codes.reshape(raw.shape), scale.reshape(groups), minimum.reshape(groups)


def _affine_integers(matrix: Scaled) -> Affine:
    rows = len(matrix.codes)
    zero = np.zeros((1, 1), np.float32) if matrix.zero is None else matrix.zero
    scale = np.broadcast_to(matrix.scale, (rows, matrix.scale.shape[1]))
    return matrix.codes, scale, -(scale * zero)


def group_size(name: str) -> int:
    """Elements that share a scale and a minimum in a format of `AFFINE`."""
    return PACKED[name][1] if name in PACKED else 32


def group_of(raw: RawTensor) -> int:
    """The same of a tensor in a format of `AFFINE` or `INTEGERS`; of these, the scales beside the codes tell it."""
    if raw.dtype not in INTEGERS:
        return group_size(raw.dtype)
    return raw.shape[-1] // raw.extra[0].shape[-2 if raw.dtype.startswith(("awq", "gptq")) else -1]
