"""Sizes of stored tensors."""
import gguf
import pytest
from isthmus.core.quant.formats import FORMATS, GGUF_TYPES, GGUF_UNREAD, SAFETENSORS_TYPES, nbytes


@pytest.mark.parametrize("number, name", GGUF_TYPES.items())
def test_every_gguf_type_has_the_number_and_size_of_ggml(number, name):
    kind = gguf.GGMLQuantizationType(number)
    assert kind.name.lower() == name
    assert (FORMATS[name].block, FORMATS[name].block_bytes) == gguf.GGML_QUANT_SIZES[kind]


def test_types_that_are_not_read_are_named_as_ggml_names_them():
    assert {gguf.GGMLQuantizationType(n).name.lower() for n in GGUF_UNREAD} == set(GGUF_UNREAD.values())
    assert not set(GGUF_UNREAD) & set(GGUF_TYPES)


def test_safetensors_types_are_formats_of_the_width_in_their_name():
    widths = {"BOOL": 8} | {w: int("".join(c for c in w.split("_")[0] if c.isdigit())) for w in SAFETENSORS_TYPES
                            if w != "BOOL"}
    assert {w: 8 * FORMATS[name].block_bytes for w, name in SAFETENSORS_TYPES.items()} == widths


@pytest.mark.parametrize("dtype, shape, size", [
    ("f32", (3, 5), 60), ("bf16", (7,), 14), ("f32", (), 4), ("i8", (0, 9), 0), ("q4_0", (2, 64), 72),
    ("q4_1", (1, 32), 20), ("q5_0", (32,), 22), ("q5_1", (3, 32), 72), ("q8_0", (5, 32), 170), ("q4_k", (2, 256), 288),
    ("q5_k", (1, 512), 352), ("q6_k", (4, 256), 840)])
def test_nbytes(dtype, shape, size):
    assert nbytes(dtype, shape) == size


@pytest.mark.parametrize("dtype, shape, words", [
    ("q9", (32,), "unknown format 'q9'"), ("q4_0", (32, 33), "multiple of the 32"), ("q6_k", (), "multiple of the 256"),
    ("f32", (2, -1), "negative")])
def test_nbytes_refuses(dtype, shape, words):
    with pytest.raises(ValueError, match=words):
        nbytes(dtype, shape)
