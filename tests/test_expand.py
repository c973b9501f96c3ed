"""Block formats against the `gguf` library's own dequantizer, bit for bit."""
from __future__ import annotations

import gguf
import numpy as np
import pytest
from isthmus.core.platform import RawTensor, Unsupported
from isthmus.platforms import expand as module
from isthmus.platforms.expand import AFFINE, CODECS, affine, expand

BLOCKS = [name for name, codec in CODECS.items() if codec.elements > 1]


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


@pytest.mark.parametrize("name", AFFINE)
def test_affine_view_is_exact(name: str) -> None:
    shape = (3, 5, 96)
    blocks = random_bytes(name, shape, seed=2).reshape(-1, CODECS[name].nbytes)
    blocks[:, 1] &= 0x3f  # a finite scale, and below a finite minimum
    blocks[:, 3] &= 0x3f
    codes, scale, minimum = affine(RawTensor(name, shape, blocks.reshape(-1)))
    assert codes.shape == shape and scale.shape == minimum.shape == (3, 5, 3)
    assert codes.dtype == (np.int8 if name == "q8_0" else np.uint8)
    assert scale.dtype == minimum.dtype == np.float32
    assert name == "q8_0" or codes.max() == (15 if name.startswith("q4") else 31)
    got = codes.reshape(3, 5, 3, 32) * scale[..., None] + minimum[..., None]
    np.testing.assert_array_equal(got.reshape(shape), library_values(name, blocks.reshape(-1), shape))


def test_the_result_owns_its_memory() -> None:
    data = np.zeros(4, np.float32)
    got = expand(RawTensor("f32", (4,), data.view(np.uint8)))
    data[:] = 7
    assert not got.any()


@pytest.mark.parametrize("raw, words", [
    (RawTensor("q8_0", (2, 32), np.zeros(67, np.uint8)), "68 bytes, not 67"),
    (RawTensor("q4_0", (2, 16), np.zeros(18, np.uint8)), "multiple of 32"),
])
def test_bytes_must_fit_the_shape(raw: RawTensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        expand(raw)


def test_unknown_formats_are_named() -> None:
    with pytest.raises(Unsupported, match="'iq2_xs'.*q4_k"):
        expand(RawTensor("iq2_xs", (256,), np.zeros(74, np.uint8)))
    with pytest.raises(Unsupported, match="'q6_k'.*q4_1"):
        affine(RawTensor("q6_k", (256,), np.zeros(210, np.uint8)))
