"""Products with the weights of a Llama-3-8B layer, dense and kept in their formats, beside torch.matmul in bf16.

The floor of few tokens is the bytes of the weight over the measured bandwidth. Copies of the weight are used in turn,
so that a cache holds none of it. Blocks of fp8 meet activations in 8 bits: by whom, their trials at load decide.
"""
from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from ceilings import bytes_a_second, flops_a_second
from isthmus.core.platform import RawTensor, WeightSpec
from place import Place, figure, main, share, timed
from torch.nn import functional as F

SHAPES = {"qkv": (6144, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}  # out, in
TOKENS = (1, 16, 64, 256, 4096)
BLOCKS = {"q4_0": (32, 18), "q8_0": (32, 34)}  # elements and bytes of a block, whose first two are its scale
SCALE = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
CACHED = 256 << 20  # bytes that a device may hold in a cache


def raw(name: str, shape: tuple[int, int]) -> RawTensor:
    """Random codes in a checkpoint's format, of about the size that weights have."""
    rng, count = np.random.default_rng(0), shape[0] * shape[1]
    if name == "bf16":
        values = rng.normal(size=1 << 20).astype(np.float32) * np.float32(0.02)
        return RawTensor(name, shape, np.resize((values.view(np.uint32) >> 16).astype("<u2"), count).view(np.uint8))
    if name in ("fp8", "fp8_128"):
        codes = np.resize(rng.integers(0, 0x60, 1 << 20, dtype=np.uint8), count)
        across = (shape[0], 1) if name == "fp8" else tuple(-(-size // 128) for size in shape)
        scales = np.full(across, 1e-3, "<f4").view(np.uint8).reshape(-1)
        return RawTensor(name, shape, codes, (RawTensor("f32", across, scales),))
    each, nbytes = BLOCKS[name]
    blocks = np.resize(rng.integers(0, 256, 1 << 20, dtype=np.uint8), count // each * nbytes).reshape(-1, nbytes)
    blocks[:, :2] = SCALE
    return RawTensor(name, shape, blocks.reshape(-1))


def bytes_of(name: str, count: int) -> float:
    """As a checkpoint holds it."""
    return count * (BLOCKS[name][1] / BLOCKS[name][0] if name in BLOCKS else 2 if name == "bf16" else 1)


def measure(place: Place, ceilings: dict[str, Any], part: str, name: str) -> Iterator[dict[str, Any]]:
    shape = place.pick(SHAPES[part], (64, 128))
    spec = WeightSpec((f"{part}.weight",), "linear", narrow=name == "fp8_128")  # as its checkpoints say
    leaf = place.platform.load([raw(name, shape)], spec, "bf16")
    nbytes, count = bytes_of(name, shape[0] * shape[1]), shape[0] * shape[1]
    copies = [leaf, *(deepcopy(leaf) for _ in range(place.pick(min(7, int(CACHED // nbytes)), 1)))]
    for tokens in place.pick(TOKENS, (1, 3)):
        x = place.random(tokens, shape[1])
        calls = [lambda each=each, x=x: each.product(x) for each in copies]
        seconds, how = timed(calls, place)
        yield {"what": part, "format": name, "by": str(leaf), "tokens": tokens, "us": figure(1e6 * seconds),
               "how": how, "of bandwidth": share(nbytes / seconds, bytes_a_second(ceilings)),
               "of products": share(2 * tokens * count / seconds, flops_a_second(ceilings))}


def matmul(place: Place, ceilings: dict[str, Any], part: str) -> Iterator[dict[str, Any]]:
    shape = place.pick(SHAPES[part], (64, 128))
    count = shape[0] * shape[1]
    copies = [place.random(*shape) for _ in range(place.pick(1 + min(7, CACHED // (2 * count)), 2))]
    for tokens in place.pick(TOKENS, (1, 3)):
        x = place.random(tokens, shape[1])
        seconds, how = timed([lambda w=w, x=x: F.linear(x, w) for w in copies], place)
        yield {"what": part, "format": "bf16", "by": "torch.matmul", "tokens": tokens, "us": figure(1e6 * seconds),
               "how": how, "of bandwidth": share(2 * count / seconds, bytes_a_second(ceilings)),
               "of products": share(2 * tokens * count / seconds, flops_a_second(ceilings))}


def run(place: Place, ceilings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for part in place.pick(tuple(SHAPES), ("qkv",)):
        yield from matmul(place, ceilings, part)
        for name in ("bf16", "fp8", "fp8_128", "q4_0", "q8_0"):
            try:
                yield from measure(place, ceilings, part, name)
            except Exception as error:  # one format's failure is a row of its own
                yield {"what": part, "format": name, "error": f"{type(error).__name__}: {error}"[:300]}
        if not place.device.host:
            torch.accelerator.empty_cache()


if __name__ == "__main__":
    main(__doc__, run)
