"""A rank's share of a tensor in its own format has the values of the share of the whole."""
from __future__ import annotations

import numpy as np
import pytest
from isthmus.conformance import schemes
from isthmus.conformance.formats import quantized
from isthmus.core.platform import RawTensor, Unsupported
from isthmus.platforms.cut import cut
from isthmus.platforms.expand import expand

COST = 3  # seconds
NAMES = ("f32", "f16", "bf16", "q4_0", "q8_0", "affine4_64", "affine3_64", *schemes.FORMATS)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_shares_are_slices_of_the_values(name: str, axis: int) -> None:
    draw = np.random.default_rng(0)
    for shape in ((256, 256), (3, 256, 256)):
        raw = quantized(draw, name, shape)[0]
        want = np.split(expand(raw), 2, axis - 2)
        for rank, values in enumerate(want):
            share = cut(raw, axis, rank, 2)
            assert share.shape == values.shape and share.data.size * 2 == raw.data.size
            np.testing.assert_array_equal(expand(share), values)
        assert cut(raw, axis, 0, 1) is raw


@pytest.mark.parametrize("name, shape, axis, world, unit", [
    ("f32", (6, 4), 0, 4, 1), ("q4_0", (4, 32), 1, 2, 32), ("affine4_64", (4, 64), 1, 2, 64),
    ("awq4", (40, 64), 0, 2, 8), ("awq4", (16, 96), 1, 2, 32), ("gptq4", (24, 64), 0, 2, 8),
    ("gptq3", (32, 64), 0, 2, 32), ("gptq4", (16, 96), 1, 2, 32), ("gptq4_act", (16, 40 * 8), 1, 32, 8),
    ("pack4_asym", (24, 64), 0, 2, 8), ("pack4", (24, 96), 1, 2, 32), ("fp8_128", (128, 256), 0, 2, 128),
    ("fp8_128", (128, 300), 1, 2, 128), ("fp8", (3, 8), 0, 2, 1), ("mxfp4", (4, 96), 1, 2, 32),
    ("nvfp4", (4, 48), 1, 2, 16)])
def test_cuts_through_words_groups_and_blocks_are_refused(name, shape, axis, world, unit) -> None:
    raw = quantized(np.random.default_rng(0), name, shape)[0]
    with pytest.raises(Unsupported, match=f"{name}.*into {world} along axis {axis}.*multiple of {unit}$"):
        cut(raw, axis, 0, world)


def test_scales_of_the_whole_stay_whole() -> None:
    codes, one = np.arange(64, dtype=np.int8), np.array([0.5], np.float32)
    raw = RawTensor("int8", (8, 8), codes.view(np.uint8), (RawTensor("f32", (1, 1), one.view(np.uint8)),))
    for axis in (0, 1):
        np.testing.assert_array_equal(expand(cut(raw, axis, 1, 4)), np.split(codes.reshape(8, 8) / 2, 4, axis)[1])


def test_vectors() -> None:
    values = np.arange(12, dtype=np.float32)
    np.testing.assert_array_equal(expand(cut(RawTensor("f32", (12,), values.view(np.uint8)), 0, 2, 3)), values[8:])
