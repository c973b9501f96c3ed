"""Cases of the sparse feed-forward: routing, ties, experts in every kind of format."""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.plan import Batch
from ..core.platform import MoESpec, RawTensor
from .formats import quantized
from .opcase import QUANTIZED_NMSE, OpCase, normal, parts, single, table, token_batch, weight
from .ops_dense import act


def routed(logits: np.ndarray, spec: MoESpec, bias: Sequence[float] | None = None) -> list[tuple[int, float]]:
    """One token's experts and their weights."""
    if spec.scoring == "softmax":
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    size = spec.experts // spec.groups
    choice = scores if bias is None else [score + b for score, b in zip(scores, bias, strict=True)]

    def told(group: int) -> float:
        return sum(sorted(choice[group * size:(group + 1) * size])[-1 if bias is None else -2:])
    groups = sorted(range(spec.groups), key=lambda g: (-told(g), g))[:spec.top_groups]
    allowed = [e for e in range(spec.experts) if e // size in groups]
    best = sorted(allowed, key=lambda e: (-choice[e], e))[:spec.top_k]
    total = sum(scores[e] for e in best) + 1e-20 if spec.renormalize else 1
    return [(e, scores[e] / total * spec.scale) for e in best]


def experts_of(rng: np.random.Generator, format: str, experts: int, rows: tuple[int, ...], width: int,
               apart: bool) -> tuple[list[RawTensor], np.ndarray]:
    """Parts of `rows` and their values [experts, sum of rows, width]: one tensor, or each expert's parts apart."""
    if not apart:
        raw, values = quantized(rng, format, (experts, sum(rows), width))
        return [raw], values
    raws, parts = zip(*(quantized(rng, format, (height, width)) for _ in range(experts) for height in rows),
                      strict=True)
    return list(raws), np.concatenate(parts).reshape(experts, sum(rows), width)


def moe_case(name: str, spec: MoESpec, tokens: int, dtype: str, format: str = "f32", ties: bool = False,
             apart: bool = False, inner: int = 96, bias: Sequence[float] | None = None, low: int = 0) -> OpCase:
    """apart: each expert's tensors by themselves, gate and up too, as many checkpoints have them. bias: of the scores.
    low: the first tokens, whose scores are all 0 in float32."""
    width, grouped = 64, spec.groups > 1 or bias is not None

    def make(rng: np.random.Generator) -> tuple:
        first, dense13 = experts_of(rng, format, spec.experts, (inner, inner), width, apart)
        second, dense2 = experts_of(rng, format, spec.experts, (width,), inner, apart)
        x = normal(rng, (tokens, width), dtype, 0.25 if dtype == "f16" else 1)  # f16 holds no more than 65504
        router = normal(rng, (tokens, spec.experts), dtype)
        if ties:
            router = abs(np.round(router))  # small integers: many experts score the same
        router[:low] = -200
        expected = np.zeros((tokens, width))
        for t in range(tokens):
            for expert, share in routed(router[t], spec, bias):
                up_and_gate = dense13[expert] @ x[t]
                hidden = np.array([act(g, spec.act) for g in up_and_gate[:inner]]) * up_and_gate[inner:]
                expected[t] += share * (dense2[expert] @ hidden)

        def forward(ops: Any, w: Any, batch: Batch) -> Any:
            x, router = (ops.embed(batch.tokens, w[name]) for name in ("x", "router"))
            return ops.moe(x, router, w["w13"], w["w2"], spec, *([] if bias is None else [w["bias"]]))
        weights = {"x": table(x), "router": table(router), "w13": parts(first, "experts", spec.experts),
                   "w2": parts(second, "experts", spec.experts)}
        if bias is not None:
            weights["bias"] = (*weight(np.array(bias), "bias"), "f32")
        return weights, forward, token_batch(tokens), expected
    asks = {"experts": spec.experts, "top_k": spec.top_k}
    if grouped:
        asks |= {"groups": spec.groups, "top_groups": spec.top_groups, "bias": bias is not None}
    # The format is not asked for: what has no kernel is expanded by `load`, and must be right too.
    return single(name, "moe", dtype, make, asks, QUANTIZED_NMSE[dtype] if dtype != "f32" else 1e-9,
                  features=("moe", "expert_groups")[:1 + grouped])


def moe_cases(dtype: str) -> Iterator[OpCase]:
    yield moe_case("softmax", MoESpec(8, 2), 9, dtype)
    yield moe_case("softmax,raw", MoESpec(8, 3, renormalize=False), 9, dtype)
    yield moe_case("sigmoid,scaled", MoESpec(8, 2, "sigmoid", scale=2.5), 9, dtype)
    yield moe_case("sigmoid,raw,gelu", MoESpec(4, 1, "sigmoid", renormalize=False, act="gelu_tanh"), 5, dtype)
    yield moe_case("one_token", MoESpec(8, 2), 1, dtype)
    yield moe_case("all_experts", MoESpec(4, 4), 3, dtype)
    yield moe_case("ties,softmax", MoESpec(8, 2), 12, dtype, ties=True)
    yield moe_case("ties,sigmoid", MoESpec(8, 3, "sigmoid"), 12, dtype, ties=True)
    for format in ("f16", "bf16", "q4_0", "q4_1", "q5_0", "q8_0", "affine4_32", "awq4", "fp8_128", "mxfp4"):
        yield moe_case(f"softmax,{format}", MoESpec(4, 2), 6, dtype, format)
    yield moe_case("softmax,affine8_64", MoESpec(4, 2), 6, dtype, "affine8_64", inner=128)
    yield moe_case("many_tokens", MoESpec(8, 2), 70, dtype, "q4_1")
    for format in ("f32", "q8_0", "affine4_32", "awq4", "gptq4", "gptq4_act", "pack4", "int8", "fp8", "nvfp4"):
        yield moe_case(f"apart,{format}", MoESpec(4, 2), 6, dtype, format, apart=True)
    yield from bias_cases(dtype)
    yield from group_cases(dtype)


def bias_cases(dtype: str) -> Iterator[OpCase]:
    """A bias that turns the choice around, and one whose steps only float32 tells apart."""
    uneven = (0.5, -0.75, 0.25, 0.5, -1.0, 0.0, 0.75, -0.25)
    yield moe_case("bias,sigmoid", MoESpec(8, 2, "sigmoid", scale=2.5), 9, dtype, bias=uneven)
    yield moe_case("bias,raw", MoESpec(8, 3, "sigmoid", renormalize=False), 9, dtype, bias=uneven)
    yield moe_case("bias,softmax", MoESpec(8, 2), 9, dtype, bias=uneven)
    yield moe_case("bias,ties", MoESpec(8, 3, "sigmoid"), 12, dtype, ties=True, bias=(0.25,) * 8)
    fine = tuple(0.5 + 1e-4 * (e * 3 % 8) for e in range(8))
    yield moe_case("bias,fine", MoESpec(8, 2, "sigmoid"), 12, dtype, ties=True, bias=fine)
    yield moe_case("bias,many_tokens", MoESpec(8, 2, "sigmoid"), 40, dtype, "q8_0", bias=uneven)


def group_cases(dtype: str) -> Iterator[OpCase]:
    """Groups by their best score, by their two best with a bias; among equals; with nothing above 0."""
    uneven = (0.5, -0.75, 0.25, 0.5, -1.0, 0.0, 0.75, -0.25, 0.0, 0.25, 0.25, -0.5)
    four = MoESpec(12, 3, groups=4, top_groups=2)
    by_sigmoid = replace(four, scoring="sigmoid", scale=2.5)
    yield moe_case("groups,softmax", four, 16, dtype)
    yield moe_case("groups,sigmoid", by_sigmoid, 16, dtype)
    yield moe_case("groups,bias", by_sigmoid, 16, dtype, bias=uneven)
    yield moe_case("groups,two_best", by_sigmoid, 16, dtype, bias=(0.0,) * 12)
    yield moe_case("groups,one,raw", replace(by_sigmoid, top_groups=1, renormalize=False), 16, dtype, bias=uneven)
    yield moe_case("groups,all", replace(by_sigmoid, top_groups=4), 9, dtype, bias=uneven)
    yield moe_case("groups,ties", four, 24, dtype, ties=True)
    yield moe_case("groups,ties,bias", by_sigmoid, 24, dtype, ties=True, bias=(0.25,) * 12)
    yield moe_case("groups,below_zero", by_sigmoid, 16, dtype, bias=tuple(b - 3 for b in uneven))
    yield moe_case("groups,all_scores_zero", by_sigmoid, 9, dtype, bias=(0.0,) * 12, low=3)
    yield moe_case("groups,all_scores_zero,below_zero", by_sigmoid, 9, dtype, bias=(-1.0,) * 12, low=3)
