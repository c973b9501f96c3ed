"""MLX's quantized tensors, written by numpy."""
from __future__ import annotations

import numpy as np
from isthmus.core.platform import RawTensor


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [..., in] as MLX packs them: uint32 words, bit i of code j at bit j * bits + i of the row."""
    spread = (codes[..., None].astype(np.int64) >> np.arange(bits) & 1).astype(np.uint8)
    return np.packbits(spread.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little").view("<u4")


def packed(name: str, codes: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> RawTensor:
    """A tensor in the format `name` ("affine4_32"), its scales and biases in float32 beside it."""
    bits = int(name.removeprefix("affine").split("_")[0])
    beside = (RawTensor("f32", part.shape, np.ascontiguousarray(part, "<f4").view(np.uint8).reshape(-1))
              for part in (scale, bias))
    return RawTensor(name, codes.shape, pack_codes(codes, bits).view(np.uint8).reshape(-1), tuple(beside))
