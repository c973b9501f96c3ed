"""Storage formats of tensors: how many values share a block and how many bytes it takes. Nothing is computed here.

Sources: ggml's block layouts (`ggml-common.h`) and the GGUF document for block formats; `mlx.core.quantize` for affine
groups; the safetensors format document for plain types; for schemes see `schemes`. Every multi-byte field is
little-endian.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import Literal, NamedTuple

Kind = Literal["float", "int", "quantized"]


class Format(NamedTuple):
    """One storage format.

    block:       values that are stored together along the last axis; 1 for plain types.
    block_bytes: bytes of one block.
    bits:        bits of one stored code, without scales and minima.
    kind:        "float" and "int" are plain numbers; "quantized" blocks carry their scales, or have them beside.
    beside:      names of the tensors that the format keeps beside its codes, as `RawTensor.extra` has them.
    """

    name: str
    block: int
    block_bytes: int
    bits: int
    kind: Kind
    beside: tuple[str, ...] = ()


def _plain(kind: Kind, bits: int, *names: str) -> list[Format]:
    return [Format(name, 1, bits // 8, bits, kind) for name in names]


def _affine(bits: int) -> list[Format]:
    """Groups of MLX: w = scale * code + bias. The codes of a row are one stream of bits, the lowest first."""
    return [Format(f"affine{bits}_{group}", group, group * bits // 8, bits, "quantized", ("scales", "biases"))
            for group in (32, 64, 128)]


def _gptq(bits: int) -> list[Format]:
    """w = scale * (code - zero); zero is (stored + 1) mod 2^bits, in "_v2" as stored.

    codes [in * bits / 32, out] i32: down a column one stream of bits, the lowest first. scales [groups, out]; zeros
    [groups, ceil(out * bits / 32)] i32: along a row one such stream. A group is a run of in / groups inputs.
    """
    return [Format(f"gptq{bits}{end}", 32 // gcd(bits, 32), bits * 4 // gcd(bits, 32), bits, "quantized",
                   ("scales", "zeros")) for end in ("", "_v2")]


def _pack(bits: int) -> list[Format]:
    """w = scale * (code - zero); zero is 2^(bits - 1), in "_asym" stored.

    codes [out, in * bits / 32] i32: along a row one stream of bits, the lowest first. scales [out, groups] or [1, 1];
    zeros [ceil(out * bits / 32), groups] i32: down a column one such stream. Groups as in `_gptq`.
    """
    return [Format(f"pack{bits}{end}", 32 // bits, 4, bits, "quantized", beside)
            for end, beside in (("", ("scales",)), ("_asym", ("scales", "zeros")))]


def _ordered(formats: Sequence[Format]) -> list[Format]:
    """These formats, and with groups that are no runs ("act order"): `order` [in] i32 names the group of each input."""
    return [*formats, *(f._replace(name=f"{f.name}_act", beside=(*f.beside, "order")) for f in formats)]


BLOCK = 128  # rows and columns that share a scale of "fp8_128"; the last ones may be fewer

# What schemes keep beside row-major codes [out, in].  scales [out, groups], or [1, 1] for all of it; f16, bf16, f32.
_SCALED = [
    # codes [in, out / 8] i32 and zeros [groups, out / 8] i32: output 8n + (0, 2, 4, 6, 1, 3, 5, 7)[i] is bits 4i to
    # 4i + 3 of word n of its row; scales [groups, out]; w = scale * (code - zero)
    Format("awq4", 2, 1, 4, "quantized", ("scales", "zeros")),
    Format("int8", 1, 1, 8, "quantized", ("scales",)),           # w = scale * code, signed
    Format("fp8", 1, 1, 8, "quantized", ("scales",)),            # w = scale * e4m3; scales may be f8_e8m0
    Format("fp8_128", 1, 1, 8, "quantized", ("scales",)),        # scales [ceil(out / 128), ceil(in / 128)]
    # Two e2m1 codes to a byte, the first in the low half.
    Format("mxfp4", 32, 16, 4, "quantized", ("scales",)),        # w = e2m1 * scale; scales [out, in / 32] f8_e8m0
    Format("nvfp4", 16, 8, 4, "quantized", ("scales", "factor")),       # scales [out, in / 16] f8_e4m3; factor [] f32;
    Format("nvfp4_div", 16, 8, 4, "quantized", ("scales", "divisor")),  # w = e2m1 * (scale * factor, or / divisor)
]

FORMATS: dict[str, Format] = {f.name: f for f in [
    *_plain("float", 64, "f64"), *_plain("float", 32, "f32"), *_plain("float", 16, "f16", "bf16"),
    *_plain("float", 8, "f8_e4m3", "f8_e5m2", "f8_e8m0"),
    *_plain("int", 64, "i64", "u64"), *_plain("int", 32, "i32", "u32"), *_plain("int", 16, "i16", "u16"),
    *_plain("int", 8, "i8", "u8", "bool"),
    Format("q4_0", 32, 18, 4, "quantized"),     # f16 scale; w = d * (q - 8)
    Format("q4_1", 32, 20, 4, "quantized"),     # f16 scale, f16 minimum; w = d * q + m
    Format("q5_0", 32, 22, 5, "quantized"),     # f16 scale, 32 high bits; w = d * (q - 16)
    Format("q5_1", 32, 24, 5, "quantized"),     # f16 scale, f16 minimum, 32 high bits; w = d * q + m
    Format("q8_0", 32, 34, 8, "quantized"),     # f16 scale; w = d * q
    Format("q4_k", 256, 144, 4, "quantized"),   # 8 groups of 32 with 6-bit scales and minima under f16 d and dmin
    Format("q5_k", 256, 176, 5, "quantized"),   # q4_k and 256 high bits
    Format("q6_k", 256, 210, 6, "quantized"),   # 16 groups of 16 with int8 scales under f16 d; w = d * s * (q - 32)
    *_affine(2), *_affine(3), *_affine(4), *_affine(5), *_affine(6), *_affine(8),
    *_gptq(2), *_gptq(3), *_ordered([*_gptq(4), *_gptq(8)]), *_ordered([*_pack(4), *_pack(8)]), *_SCALED,
]}

GGUF_TYPES: dict[int, str] = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 12: "q4_k", 13: "q5_k", 14: "q6_k",
    24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 30: "bf16",
}

# Types that GGUF defines and this engine does not read, so that an error can name them.
GGUF_UNREAD: dict[int, str] = {
    9: "q8_1", 10: "q2_k", 11: "q3_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s",
    20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4",
}

SAFETENSORS_TYPES: dict[str, str] = {
    "F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16", "F8_E4M3": "f8_e4m3", "F8_E5M2": "f8_e5m2",
    "F8_E8M0": "f8_e8m0", "I64": "i64", "U64": "u64", "I32": "i32", "U32": "u32", "I16": "i16", "U16": "u16",
    "I8": "i8", "U8": "u8", "BOOL": "bool",
}


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of logical `shape` in format `dtype`, without the tensors beside it.

    Raises ValueError for an unknown format, a negative size, or a last axis that is no multiple of the block length.
    """
    if dtype not in FORMATS:
        raise ValueError(f"unknown format {dtype!r}; known: {', '.join(FORMATS)}")
    fmt = FORMATS[dtype]
    if any(n < 0 for n in shape):
        raise ValueError(f"shape {tuple(shape)} has a negative size")
    last = shape[-1] if shape else 1
    if last % fmt.block:
        raise ValueError(f"last axis of {tuple(shape)} is no multiple of the {fmt.block} values in a block of {dtype}")
    return prod(shape) // fmt.block * fmt.block_bytes
