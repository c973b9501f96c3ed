"""Cases of the sparse feed-forward: routing, ties, experts in every kind of format."""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.plan import Batch
from ..core.platform import MoESpec, RawTensor
from .formats import quantized
from .opcase import QUANTIZED_NMSE, OpCase, normal, parts, single, table, token_batch
from .ops_dense import act


def routed(logits: np.ndarray, spec: MoESpec) -> list[tuple[int, float]]:
    """One token's experts and their weights."""
    if spec.scoring == "softmax":
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    best = sorted(range(spec.experts), key=lambda e: (-scores[e], e))[:spec.top_k]
    total = sum(scores[e] for e in best) if spec.renormalize else 1
    return [(e, scores[e] / total * spec.scale) for e in best]


def by_expert(raw: RawTensor, stacked: int) -> list[RawTensor]:
    """One tensor of all experts as tensors of two axes, expert by expert, `stacked` parts each."""
    experts, rows, width = raw.shape
    data = raw.data.reshape(experts, stacked, -1)
    extras = [by_expert(extra, stacked) for extra in raw.extra]
    return [RawTensor(raw.dtype, (rows // stacked, width), data[divmod(i, stacked)], tuple(e[i] for e in extras))
            for i in range(experts * stacked)]


def moe_case(name: str, spec: MoESpec, tokens: int, dtype: str, format: str = "f32", ties: bool = False,
             apart: bool = False, inner: int = 96) -> OpCase:
    """apart: each expert's tensors by themselves, gate and up too, as many checkpoints have them."""
    width = 64

    def make(rng: np.random.Generator) -> tuple:
        w13, dense13 = quantized(rng, format, (spec.experts, 2 * inner, width))
        w2, dense2 = quantized(rng, format, (spec.experts, width, inner))
        x = normal(rng, (tokens, width), dtype, 0.25 if dtype == "f16" else 1)  # f16 holds no more than 65504
        router = normal(rng, (tokens, spec.experts), dtype)
        if ties:
            router = np.round(router)  # small integers: many experts score the same
        expected = np.zeros((tokens, width))
        for t in range(tokens):
            for expert, share in routed(router[t], spec):
                up_and_gate = dense13[expert] @ x[t]
                hidden = np.array([act(g, spec.act) for g in up_and_gate[:inner]]) * up_and_gate[inner:]
                expected[t] += share * (dense2[expert] @ hidden)

        def forward(ops: Any, w: Any, batch: Batch) -> Any:
            x, router = (ops.embed(batch.tokens, w[name]) for name in ("x", "router"))
            return ops.moe(x, router, w["w13"], w["w2"], spec)
        first, second = (by_expert(w13, 2), by_expert(w2, 1)) if apart else ([w13], [w2])
        return ({"x": table(x), "router": table(router), "w13": parts(first, "experts", spec.experts),
                 "w2": parts(second, "experts", spec.experts)}, forward, token_batch(tokens), expected)
    # The format is not asked for: what has no kernel is expanded by `load`, and must be right too.
    return single(name, "moe", dtype, make, {"experts": spec.experts, "top_k": spec.top_k},
                  QUANTIZED_NMSE[dtype] if dtype != "f32" else 1e-9, features=("moe",))


def moe_cases(dtype: str) -> Iterator[OpCase]:
    yield moe_case("softmax", MoESpec(8, 2), 9, dtype)
    yield moe_case("softmax,raw", MoESpec(8, 3, renormalize=False), 9, dtype)
    yield moe_case("sigmoid,scaled", MoESpec(8, 2, "sigmoid", scale=2.5), 9, dtype)
    yield moe_case("sigmoid,raw,gelu", MoESpec(4, 1, "sigmoid", renormalize=False, act="gelu_tanh"), 5, dtype)
    yield moe_case("one_token", MoESpec(8, 2), 1, dtype)
    yield moe_case("all_experts", MoESpec(4, 4), 3, dtype)
    yield moe_case("ties,softmax", MoESpec(8, 2), 12, dtype, ties=True)
    yield moe_case("ties,sigmoid", MoESpec(8, 3, "sigmoid"), 12, dtype, ties=True)
    for format in ("f16", "bf16", "q4_0", "q4_1", "q5_0", "q8_0", "affine4_32"):
        yield moe_case(f"softmax,{format}", MoESpec(4, 2), 6, dtype, format)
    yield moe_case("softmax,affine8_64", MoESpec(4, 2), 6, dtype, "affine8_64", inner=128)
    yield moe_case("many_tokens", MoESpec(8, 2), 70, dtype, "q4_1")
    for format in ("f32", "q8_0", "affine4_32"):
        yield moe_case(f"apart,{format}", MoESpec(4, 2), 6, dtype, format, apart=True)


