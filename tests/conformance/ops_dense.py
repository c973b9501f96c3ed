"""Cases of the ops that look at one token at a time: embedding, matrix products, norms, rotation, activations."""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.plan import Batch
from ..core.platform import RopeSpec
from . import schemes
from .formats import quantized, rounded
from .opcase import NMSE, QUANTIZED_NMSE, OpCase, normal, parts, single, table, token_batch, weight

# Embedding and matrix products.

BLOCK_FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
AFFINE_FORMATS = tuple(f"affine{bits}_{group}" for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128))


def embed_case(name: str, dtype: str) -> OpCase:
    def make(rng: np.random.Generator) -> tuple:
        raw, values = quantized(rng, name, (40, 256))
        batch = token_batch(6)._replace(tokens=np.array([7, 0, 39, 7, 12, 1], np.int32))
        return ({"w": parts([raw], "embed")}, lambda ops, w, batch: ops.embed(batch.tokens, w["w"]), batch,
                values[batch.tokens])
    return single(name, "embed", dtype, make)


def linear_case(formats: tuple[str, ...], tokens: int, width: int, dtype: str, bias: bool = False,
                role: str = "linear", outputs: tuple[int, ...] = (48, 16, 80)) -> OpCase:
    """Parts of `outputs` stacked."""
    def make(rng: np.random.Generator) -> tuple:
        made = [quantized(rng, name, (outputs[i], width)) for i, name in enumerate(formats)]
        dense = np.concatenate([values for _, values in made])
        x, b = normal(rng, (tokens, width), dtype), normal(rng, (len(dense),), dtype)
        weights = {"x": table(x), "w": parts([raw for raw, _ in made], role)}
        if bias:
            weights["b"] = weight(b, "bias")

        def forward(ops: Any, w: Any, batch: Batch) -> Any:
            return ops.linear(ops.embed(batch.tokens, w["x"]), w["w"], w.get("b"))
        return weights, forward, token_batch(tokens), x @ dense.T + (b if bias else 0)
    kind = f"{'+'.join(formats)},T{tokens}" + ",bias" * bias + f",{role}" * (role != "linear")
    kind += f",{outputs[0]}_outputs" * (outputs[0] != 48)
    exact = all(name in ("f32", "f16", "bf16") for name in formats)
    return single(kind, "linear", dtype, make, {"format": formats[0]}, (NMSE if exact else QUANTIZED_NMSE)[dtype])


def overflow_case(dtype: str) -> OpCase:
    """The first half of a row's products adds up to more than f16 holds (65504), the second takes it back."""
    def make(rng: np.random.Generator) -> tuple:
        w = rounded(1 + rng.random((48, 512)), dtype)
        x = rounded(rng.normal(size=(3, 512)) + np.repeat([400, -400], 256), dtype)
        return ({"x": table(x), "w": weight(w)}, lambda ops, w, batch: ops.linear(ops.embed(batch.tokens, w["x"]),
                w["w"]), token_batch(3), x @ w.T)
    return single("large_sums", "linear", dtype, make, {"format": "f32"})


def linear_cases(dtype: str) -> Iterator[OpCase]:
    for name in ("f32", "f16", "bf16", *BLOCK_FORMATS, *AFFINE_FORMATS):
        yield linear_case((name,), 5, 512, dtype)
    for name in schemes.FORMATS:
        yield linear_case((name,), 5, 256, dtype)
    for name in ("awq4", "gptq4", "pack4", "int8", "fp8_128", "nvfp4"):  # each part has scales of its own
        yield linear_case((name,) * 3, 3, 160, dtype, bias=True, outputs=(160, 32, 32))
    for tokens in (1, 2, 33):
        yield linear_case(("f32",), tokens, 576, dtype, bias=True)
        for name in ("q4_0", "q4_1", "q8_0"):
            yield linear_case((name,), tokens, 576, dtype, bias=tokens == 2)
    yield linear_case(("q4_1", "q4_1", "q4_1"), 3, 576, dtype, bias=True)
    yield linear_case(("q8_0", "q8_0"), 3, 96, dtype)
    yield linear_case(("f32", "bf16", "f16"), 3, 64, dtype)
    yield linear_case(("q4_1", "q8_0"), 4, 576, dtype)
    yield linear_case(("q4_k", "q4_k", "q6_k"), 4, 256, dtype)
    yield linear_case(("affine4_64", "affine4_64", "affine8_64"), 3, 192, dtype, bias=True)
    yield linear_case(("q8_0",), 4, 576, dtype, role="embed")
    yield linear_case(("affine4_64",), 4, 576, dtype, role="embed")
    yield linear_case(("bf16",), 4, 64, dtype, role="embed")
    if dtype == "f16":
        yield overflow_case(dtype)
    for name in ("f32", "q4_1", "q8_0", "affine4_64"):  # a router's, and the gate of a shared expert
        yield linear_case((name,), 3, 256, dtype, outputs=(10,))
        yield linear_case((name,), 3, 256, dtype, outputs=(1,))


# Norms, rotation, activations.

def norm_case(shape: tuple[int, ...], scale: float, eps: float, dtype: str) -> OpCase:
    def reshaped(x: Any) -> Any:
        return x.reshape(-1, *shape[1:])

    def make(rng: np.random.Generator) -> tuple:
        x, w = normal(rng, shape, dtype, scale), normal(rng, shape[-1:], dtype)
        mean = np.array([sum(value * value for value in vector) / len(vector) for vector in x.reshape(-1, shape[-1])])
        expected = x / np.sqrt(mean.reshape(*shape[:-1], 1) + eps) * w
        return ({"x": table(x), "w": weight(w, "norm")},
                lambda ops, w, batch: ops.rms_norm(reshaped(ops.embed(batch.tokens, w["x"])), w["w"], eps),
                token_batch(shape[0]), expected)
    return single(f"{'x'.join(map(str, shape))},scale{scale:g},eps{eps:g}", "rms_norm", dtype, make)


def rope_case(heads: int, dim: int, positions: tuple[int, ...], scale: float, dtype: str,
              nmse: dict[str, float], part: int = 0) -> OpCase:
    """Each pair (i, i + half) of a head is a complex number, turned by position * inv_freq[i]. half: of the head, or of
    its first `part` elements, which then rotate alone."""
    half = (part or dim) // 2
    spec = RopeSpec(tuple(10000.0 ** (-i / half) for i in range(half)), scale)

    def make(rng: np.random.Generator) -> tuple:
        x = normal(rng, (len(positions), heads, dim), dtype)
        turned = x[..., :half] + 1j * x[..., half:2 * half]
        for t, position in enumerate(positions):
            for i, frequency in enumerate(spec.inv_freq):
                turned[t, :, i] *= scale * complex(math.cos(position * frequency), math.sin(position * frequency))
        return ({"x": table(x)},
                lambda ops, w, batch: ops.rope(ops.embed(batch.tokens, w["x"]).reshape(-1, heads, dim), spec),
                token_batch(len(positions), np.array(positions)),
                np.concatenate([turned.real, turned.imag, x[..., 2 * half:]], -1))
    name = f"{heads}x{dim},to{max(positions)},scale{scale:g}" + f",first{part}" * (part > 0)
    return single(name, "rope", dtype, make, {"head_dim": dim, "rotated": part} if part else {}, nmse[dtype],
                  features=("partial_rope",) * (part > 0))


def act(x: float, kind: str) -> float:
    if kind == "silu":
        return x / (1 + math.exp(-x)) if x > -700 else 0.0
    if kind == "sigmoid":
        return 1 / (1 + math.exp(-x)) if x > -700 else 0.0
    if kind == "gelu":
        return 0.5 * x * math.erfc(-x / math.sqrt(2))
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def act_case(kind: str, dtype: str, gates: int = 64, far: bool = False) -> OpCase:
    """far: gates where a naive exp overflows, by themselves: they would drown the error of the others."""
    def make(rng: np.random.Generator) -> tuple:
        gate, up = normal(rng, (6, gates), dtype, 3), normal(rng, (6, 64), dtype)
        if far:
            gate[:] = rounded(rng.choice([0, 100, -100, 1e4, -1e4, 30], gate.shape), dtype)
        return ({"gate": table(gate), "up": table(up)},
                lambda ops, w, batch: ops.act_mul(*(ops.embed(batch.tokens, w[name]) for name in ("gate", "up")), kind),
                token_batch(6), np.vectorize(act)(gate, kind) * up)
    return single(kind + ",one_gate" * (gates == 1) + ",far" * far, "act_mul", dtype, make, {"kind": kind})


def all_reduce_case(dtype: str) -> OpCase:
    def make(rng: np.random.Generator) -> tuple:
        x = normal(rng, (3, 32), dtype)
        return {"x": table(x)}, lambda ops, w, batch: ops.all_reduce(ops.embed(batch.tokens, w["x"])), token_batch(3), x
    return single("one_rank", "all_reduce", dtype, make)


def dense_cases(dtype: str) -> Iterator[OpCase]:
    """Every case of these ops."""
    for name in ("f32", "f16", "bf16", "q4_1", "q8_0", "q6_k", "affine4_64", "affine8_32"):
        yield embed_case(name, dtype)
    yield from linear_cases(dtype)
    yield norm_case((5, 576), 1, 1e-5, dtype)
    yield norm_case((5, 64), 1e-3, 1e-6, dtype)
    yield norm_case((1, 64), 1e4, 1e-6, dtype)
    yield norm_case((5, 3, 32), 1, 1e-6, dtype)
    # Angles in float32 are off by up to position * 2^-24 radians.
    yield rope_case(3, 64, (0, 1, 2, 17, 1000), 1, dtype, NMSE | {"f32": 1e-8})
    yield rope_case(2, 32, (131071, 5, 40000), 1, dtype, NMSE | {"f32": 1e-4, "bf16": 1e-3})
    yield rope_case(1, 128, (3, 4, 5), 1.25, dtype, NMSE)
    yield rope_case(2, 64, (0, 1, 2, 17, 1000), 1, dtype, NMSE | {"f32": 1e-8}, part=32)
    yield rope_case(2, 128, (7, 4, 500), 1.25, dtype, NMSE | {"f32": 1e-8}, part=32)
    yield rope_case(2, 24, (9, 2, 30), 1, dtype, NMSE, part=6)
    for kind in ("silu", "gelu_tanh", "gelu", "sigmoid"):
        yield act_case(kind, dtype)
        yield act_case(kind, dtype, far=True)
    yield act_case("sigmoid", dtype, gates=1)
    yield all_reduce_case(dtype)
