"""Block formats against the `gguf` library's own dequantizer, bit for bit; affine groups against MLX where it is."""
from __future__ import annotations

import gguf
import numpy as np
import pytest
from isthmus.conformance import schemes
from isthmus.core.platform import RawTensor, Unsupported, WeightSpec
from isthmus.core.quant.formats import FORMATS, nbytes
from isthmus.platforms import expand as module
from isthmus.platforms.expand import AFFINE, CODECS, INTEGERS, PACKED, SCALED, affine, expand, group_of, group_size
from isthmus.platforms.experts import by_expert

from .tiny_mlx import packed

BLOCKS = [name for name, codec in CODECS.items() if codec.elements > 1 and not codec.beside]


def random_bytes(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Any bytes at all: every bit pattern of a block is legal, odd half-floats included."""
    codec = CODECS[name]
    return np.random.default_rng(seed).integers(0, 256, np.prod(shape) // codec.elements * codec.nbytes, dtype=np.uint8)


def library_values(name: str, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[name.upper()]
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data.reshape(*shape[:-1], -1), kind)


@pytest.mark.parametrize("name", BLOCKS)
def test_equals_the_gguf_library(name: str) -> None:
    shape = (48, 512)
    data = random_bytes(name, shape)
    with np.errstate(all="ignore"):
        got = expand(RawTensor(name, shape, data))
    assert got.dtype == np.float32 and got.shape == shape
    np.testing.assert_array_equal(got, library_values(name, data, shape))


@pytest.mark.parametrize("name", BLOCKS)
def test_block_sizes_are_those_of_the_format(name: str) -> None:
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]] == CODECS[name][:2]


@pytest.mark.parametrize("name", ["q4_1", "q6_k", "bf16"])
def test_chunks_give_the_same_as_one_piece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (7, 1280)
    raw = RawTensor(name, shape, random_bytes(name, shape, seed=1))
    with np.errstate(all="ignore"):
        whole = expand(raw)
        monkeypatch.setattr(module, "CHUNK", 1024)
        np.testing.assert_array_equal(expand(raw), whole)


@pytest.mark.parametrize("name, dtype", [("f64", "<f8"), ("f32", "<f4"), ("f16", "<f2")])
def test_plain_floats(name: str, dtype: str) -> None:
    values = np.array([[0.0, -1.5, 3.25], [65504.0, 2.0 ** -14, -0.0]], dtype)
    got = expand(RawTensor(name, (2, 3), values.view(np.uint8).reshape(-1)))
    np.testing.assert_array_equal(got, values.astype(np.float32))


def test_bf16_is_the_upper_half_of_float32() -> None:
    values = np.array([1.0, -2.5, 3.0e38, 0.0], np.float32)
    upper = values.view("<u4") >> 16
    expected = (upper.astype("<u4") << 16).view(np.float32)
    np.testing.assert_array_equal(expand(RawTensor("bf16", (4,), upper.astype("<u2").tobytes())), expected)


@pytest.mark.parametrize("name", [name for name in AFFINE if name not in PACKED])
def test_affine_view_is_exact(name: str) -> None:
    shape = (3, 5, 768 if name.endswith("_k") else 96)
    blocks = random_bytes(name, shape, seed=2).reshape(-1, CODECS[name].nbytes)
    blocks[:, 1] &= 0x3f  # a finite scale, and below a finite minimum
    blocks[:, 3] &= 0x3f
    codes, scale, minimum = affine(RawTensor(name, shape, blocks.reshape(-1)))
    assert codes.shape == shape and scale.shape == minimum.shape == (3, 5, shape[-1] // 32)
    assert codes.dtype == (np.int8 if name == "q8_0" else np.uint8)
    assert scale.dtype == minimum.dtype == np.float32
    assert name == "q8_0" or codes.max() == (15 if name.startswith("q4") else 31)
    got = codes.reshape(3, 5, -1, 32) * scale[..., None] + minimum[..., None]
    np.testing.assert_array_equal(got.reshape(shape), library_values(name, blocks.reshape(-1), shape))


@pytest.mark.parametrize("name", PACKED)
def test_affine_groups_of_mlx(name: str) -> None:
    bits, group = PACKED[name]
    draw = np.random.default_rng(bits)
    codes = draw.integers(0, 1 << bits, (2, 3, 256))
    scale, bias = (draw.normal(size=(2, 3, 256 // group)).astype(np.float32) for _ in "sb")
    raw = packed(name, codes, scale, bias)
    assert FORMATS[name].block == group == group_size(name) and FORMATS[name].block_bytes * 8 == group * bits
    for got, want in zip(affine(raw), (codes, scale, bias), strict=True):
        np.testing.assert_array_equal(got, want)
    values = codes * np.repeat(scale, group, -1) + np.repeat(bias, group, -1)
    np.testing.assert_allclose(expand(raw), values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", PACKED)
def test_equals_mlx(name: str) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed here")
    bits, group = PACKED[name]
    values = np.random.default_rng(0).normal(size=(6, 256)).astype(np.float32)
    codes, scale, bias = mx.quantize(mx.array(values), group, bits)
    beside = [RawTensor("f32", part.shape, np.array(part).view(np.uint8).reshape(-1)) for part in (scale, bias)]
    got = expand(RawTensor(name, values.shape, np.array(codes).view(np.uint8).reshape(-1), tuple(beside)))
    np.testing.assert_allclose(got, np.array(mx.dequantize(codes, scale, bias, group, bits)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SCALED)
def test_formats_of_schemes(name: str) -> None:
    for shape in ((40, 192), (3, 32, 128)):
        raw, values = schemes.quantized(np.random.default_rng(0), name, shape)
        assert nbytes(name, shape) == raw.data.nbytes and len(FORMATS[name].beside) == len(raw.extra)
        got = expand(raw)
        np.testing.assert_allclose(got, values, rtol=2e-7, atol=0)
        if name in INTEGERS:
            group = group_of(raw)
            codes, scale, minimum = affine(raw)
            assert codes.shape == shape and scale.shape == minimum.shape == (*shape[:-1], shape[-1] // group)
            assert codes.dtype == (np.int8 if name == "int8" else np.uint8) and INTEGERS[name] == FORMATS[name].bits
            np.testing.assert_array_equal(codes * np.repeat(scale, group, -1) + np.repeat(minimum, group, -1), got)


@pytest.mark.parametrize("name", ["awq4", "gptq3", "pack4_act", "fp8_128", "nvfp4"])
def test_chunks_of_schemes_give_the_same_as_one_piece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = schemes.quantized(np.random.default_rng(1), name, (300, 192) if name == "fp8_128" else (320, 192))[0]
    whole = expand(raw)
    monkeypatch.setattr(module, "CHUNK", 1000)
    np.testing.assert_array_equal(expand(raw), whole)


def test_bits_of_small_floats() -> None:
    for name, exponent, mantissa in (("f8_e4m3", 4, 3), ("f8_e8m0", 8, 0)):
        got = expand(RawTensor(name, (256,), np.arange(256, dtype=np.uint8)))
        for code in range(256):
            sign, power, part = code >> 7, code >> mantissa & (1 << exponent) - 1, code & (1 << mantissa) - 1
            if name == "f8_e8m0":
                want = np.nan if code == 255 else 2.0 ** (code - 127)
            elif code & 127 == 127:
                want = np.nan
            else:
                want = (-1) ** sign * (part / 8 * 2.0 ** -6 if power == 0 else (1 + part / 8) * 2.0 ** (power - 7))
            np.testing.assert_equal(got[code], np.float32(want))


def test_experts_one_by_one_whichever_way_they_are_kept() -> None:
    draw = np.random.default_rng(0)
    parts = [(draw.integers(0, 16, (3, rows, 64)), *(draw.normal(size=(3, rows, 2)).astype("f4") for _ in "sb"))
             for rows in (8, 4)]
    stacked = [packed("affine4_32", *part) for part in parts]
    single = [packed("affine4_32", *(field[e] for field in part)) for e in range(3) for part in parts]
    for raws, experts in ((stacked, 3), (stacked, 0), (single, 3)):
        split = by_expert(raws, WeightSpec(("w",), "experts", None, experts))
        assert [len(expert) for expert in split] == [2, 2, 2]
        for number, expert in enumerate(split):
            for got, whole in zip(expert, stacked, strict=True):
                np.testing.assert_array_equal(expand(got), expand(whole)[number])
    for raws, experts in ((stacked, 4), (single, 4), (single, 0), (stacked + single, 3), ([], 3)):
        with pytest.raises(ValueError, match=f"{len(raws)} tensors.*no parts of {experts} experts"):
            by_expert(raws, WeightSpec(("w",), "experts", None, experts))


def test_the_result_owns_its_memory() -> None:
    data = np.zeros(4, np.float32)
    got = expand(RawTensor("f32", (4,), data.view(np.uint8)))
    data[:] = 7
    assert not got.any()


@pytest.mark.parametrize("raw, words", [
    (RawTensor("q8_0", (2, 32), np.zeros(67, np.uint8)), "68 bytes, not 67"),
    (RawTensor("q4_0", (2, 16), np.zeros(18, np.uint8)), "multiple of 32"),
    (RawTensor("affine4_32", (2, 64), np.zeros(64, np.uint8)), r"beside it \[\(2, 2\), \(2, 2\)\], not \[\]"),
    (packed("affine4_64", np.zeros((2, 64), int), np.zeros((2, 1)), np.zeros((2, 2))), r"\(2, 1\).*not.*\(2, 2\)"),
    (RawTensor("f32", (1,), np.zeros(4, np.uint8), (RawTensor("f32", (1,), np.zeros(4, np.uint8)),)), "nothing, not"),
    (RawTensor("awq4", (8, 8), np.zeros(31, np.uint8)), "takes 32 bytes, not 31"),
    (RawTensor("int8", (2, 8), np.zeros(16, np.uint8), (RawTensor("f32", (2, 3), np.zeros(24, np.uint8)),)),
     "3 groups, which do not divide"),
    (RawTensor("awq4", (8, 8), np.zeros(32, np.uint8)), "2 tensors beside"),
])
def test_bytes_must_fit_the_shape(raw: RawTensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        expand(raw)


def test_unknown_formats_are_named() -> None:
    with pytest.raises(Unsupported, match="'iq2_xs'.*q4_k"):
        expand(RawTensor("iq2_xs", (256,), np.zeros(74, np.uint8)))
    with pytest.raises(Unsupported, match="'q6_k'.*q4_1"):
        affine(RawTensor("q6_k", (256,), np.zeros(210, np.uint8)))
