"""Shared cases of the ops: what a platform must compute, in plain loops over float64, independent of any platform.

A case builds weights, a few steps and what each must give. Inputs reach the device as embedding tables whose row t is
token t's input, so that only the neck is used. All inputs are values that the compute dtype holds exactly.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
from isthmus.core.plan import Batch, Sampling, StepResult
from isthmus.core.platform import LayerState, MoESpec, RawTensor, RopeSpec, StateSpec, WeightSpec

PAGE = 16
DTYPES = ("f64", "f32", "bf16")
# Largest normalised mean squared error: f64 inputs pass through float32, bf16 rounds each op's result once or twice.
NMSE = {"f64": 1e-12, "f32": 1e-10, "bf16": 1e-4}
QUANTIZED_NMSE = {"f64": 1e-12, "f32": 1e-8, "bf16": 1e-3}


@dataclass(frozen=True)
class Step:
    """One launch. expected: values of the first `tokens` tokens (None = all), or the sampled result of the logit rows
    that are not padding. before: what happens to the state first (copied pages, for instance)."""

    forward: Callable[[Any, Any, Batch], Any]
    batch: Batch
    expected: np.ndarray | StepResult
    tokens: int | None = None
    before: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True)
class Run:
    """Weights by name, each as parts and how to load them; steps that share one state."""

    weights: dict[str, tuple[list[RawTensor], WeightSpec]]
    steps: list[Step]
    state: StateSpec
    pages: int


@dataclass(frozen=True)
class OpCase:
    """id: for people and ledgers. asks: what `Platform.supports(op, **asks)` is asked. nmse: tolerance of values."""

    id: str
    op: str
    dtype: str
    build: Callable[[], Run]
    asks: dict[str, Any] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    nmse: float = 0.0
    page_size: int | None = None

    def __str__(self) -> str:
        return self.id


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest values that `dtype` and float32 hold, in float64."""
    x = np.asarray(x, np.float32)
    if dtype == "bf16":
        bits = x.view(np.uint32)
        x = ((bits + 0x7fff + (bits >> 16 & 1)) & np.uint32(0xffff0000)).view(np.float32)
    return x.astype(np.float64)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> np.ndarray:
    return rounded(rng.normal(size=shape) * scale, dtype)


def plain(x: np.ndarray) -> RawTensor:
    """A float32 tensor of a checkpoint."""
    return RawTensor("f32", x.shape, np.ascontiguousarray(x, "<f4").view(np.uint8).reshape(-1))


Entry = tuple[list[RawTensor], WeightSpec]


def weight(x: np.ndarray, role: str = "linear") -> Entry:
    return parts([plain(x)], role)


def parts(raws: list[RawTensor], role: str = "linear") -> Entry:
    return raws, WeightSpec(tuple(f"part{i}" for i in range(len(raws))), role)


def table(x: np.ndarray) -> Entry:
    """Input of the ops: row t goes to token t."""
    return weight(x.reshape(len(x), -1), "embed")


def state(dtype: str, seqs: int) -> StateSpec:
    """Memory for cases without attention: one small layer."""
    return StateSpec((LayerState(1, 32),), dtype, PAGE, seqs)


def token_batch(count: int, positions: np.ndarray | None = None, sampling: Sampling | None = None,
                targets: np.ndarray | None = None) -> Batch:
    """`count` tokens 0, 1, ... each a row of its own: token t in sequence slot t + 1, all its pages page t + 1."""
    ids = np.arange(count, dtype=np.int32)
    positions = np.zeros(count, np.int32) if positions is None else positions.astype(np.int32)
    used = positions // PAGE + 1
    pages = np.where(np.arange(used.max()) < used[:, None], ids[:, None] + 1, 0).astype(np.int32)
    targets = np.full(count, -2) if targets is None else targets
    return Batch(tokens=ids, positions=positions, slots=(ids + 1) * PAGE + positions % PAGE, rows=ids, seqs=ids + 1,
                 starts=np.arange(count + 1, dtype=np.int32), lengths=positions + 1, pages=pages, logit_rows=ids,
                 targets=targets.astype(np.int32), sampling=sampling or Sampling())


def single(id: str, op: str, dtype: str, make: Callable[[np.random.Generator], tuple], asks: dict | None = None,
           nmse: float | None = None, **more: Any) -> OpCase:
    """A case of one step: `make(rng)` gives weights, forward, batch and expected."""
    def build() -> Run:
        weights, forward, batch, expected = make(np.random.default_rng(sum(map(ord, id))))
        size = len(batch.seqs) + 1
        return Run(weights, [Step(forward, batch, expected)], state(dtype, size), size)
    return OpCase(f"{op}[{id},{dtype}]", op, dtype, build, (asks or {}) | {"dtype": dtype},
                  nmse=NMSE[dtype] if nmse is None else nmse, **more)


def quantized(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> tuple[RawTensor, np.ndarray]:
    """A tensor of random codes with sane scales, and its values by the gguf library."""
    if name in ("f64", "f32", "f16", "bf16"):
        values = rounded(rng.normal(size=shape), "bf16") if name == "bf16" else rng.normal(size=shape).astype("<f2")
        stored = {"f64": "<f8", "f32": "<f4", "f16": "<f2", "bf16": "<f4"}[name]
        data = np.ascontiguousarray(values, stored)
        data = (data.view("<u4") >> 16).astype("<u2") if name == "bf16" else data
        return RawTensor(name, shape, data.view(np.uint8).reshape(-1)), values.astype(np.float64)
    kind = gguf.GGMLQuantizationType[name.upper()]
    length, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (math.prod(shape) // length, nbytes), dtype=np.uint8)
    offsets = {"q4_1": (0, 2), "q5_1": (0, 2), "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2),
               "q6_k": (208,)}.get(name, (0,))
    for at in offsets:
        halves = (rng.uniform(0.5, 2, len(blocks)) * 0.01).astype("<f2")
        blocks[:, at:at + 2] = halves.view(np.uint8).reshape(-1, 2)
    values = gguf.quants.dequantize(blocks.reshape(*shape[:-1], -1), kind)
    return RawTensor(name, shape, blocks.reshape(-1)), values.astype(np.float64)


# Embedding and matrix products.

BLOCK_FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")


def embed_case(name: str, dtype: str) -> OpCase:
    def make(rng: np.random.Generator) -> tuple:
        raw, values = quantized(rng, name, (40, 256))
        batch = token_batch(6)._replace(tokens=np.array([7, 0, 39, 7, 12, 1], np.int32))
        return ({"w": parts([raw], "embed")}, lambda ops, w, batch: ops.embed(batch.tokens, w["w"]), batch,
                values[batch.tokens])
    return single(name, "embed", dtype, make)


def linear_case(formats: tuple[str, ...], tokens: int, width: int, dtype: str, bias: bool = False,
                role: str = "linear") -> OpCase:
    """Parts of 48, 16, 80 ... outputs stacked."""
    def make(rng: np.random.Generator) -> tuple:
        made = [quantized(rng, name, ((48, 16, 80)[i], width)) for i, name in enumerate(formats)]
        dense = np.concatenate([values for _, values in made])
        x, b = normal(rng, (tokens, width), dtype), normal(rng, (len(dense),), dtype)
        weights = {"x": table(x), "w": parts([raw for raw, _ in made], role)}
        if bias:
            weights["b"] = weight(b, "bias")

        def forward(ops: Any, w: Any, batch: Batch) -> Any:
            return ops.linear(ops.embed(batch.tokens, w["x"]), w["w"], w.get("b"))
        return weights, forward, token_batch(tokens), x @ dense.T + (b if bias else 0)
    kind = f"{'+'.join(formats)},T{tokens}" + ",bias" * bias + f",{role}" * (role != "linear")
    exact = all(name in ("f32", "f16", "bf16") for name in formats)
    return single(kind, "linear", dtype, make, {"format": formats[0]}, (NMSE if exact else QUANTIZED_NMSE)[dtype])


def linear_cases(dtype: str) -> Iterator[OpCase]:
    for name in ("f32", "f16", "bf16", *BLOCK_FORMATS):
        yield linear_case((name,), 5, 512, dtype)
    for tokens in (1, 2, 33):
        yield linear_case(("f32",), tokens, 576, dtype, bias=True)
        for name in ("q4_0", "q4_1", "q8_0"):
            yield linear_case((name,), tokens, 576, dtype, bias=tokens == 2)
    yield linear_case(("q4_1", "q4_1", "q4_1"), 3, 576, dtype, bias=True)
    yield linear_case(("q8_0", "q8_0"), 3, 96, dtype)
    yield linear_case(("f32", "bf16", "f16"), 3, 64, dtype)
    yield linear_case(("q4_1", "q8_0"), 4, 576, dtype)
    yield linear_case(("q4_k", "q4_k", "q6_k"), 4, 256, dtype)
    yield linear_case(("q8_0",), 4, 576, dtype, role="embed")
    yield linear_case(("bf16",), 4, 64, dtype, role="embed")


# Norms, rotation, activations.

def norm_case(shape: tuple[int, ...], scale: float, eps: float, dtype: str) -> OpCase:
    def make(rng: np.random.Generator) -> tuple:
        x, w = normal(rng, shape, dtype, scale), normal(rng, shape[-1:], dtype)
        mean = np.array([sum(value * value for value in vector) / len(vector) for vector in x.reshape(-1, shape[-1])])
        expected = x / np.sqrt(mean.reshape(*shape[:-1], 1) + eps) * w
        return ({"x": table(x), "w": weight(w, "norm")},
                lambda ops, w, batch: ops.rms_norm(ops.embed(batch.tokens, w["x"]).reshape(shape), w["w"], eps),
                token_batch(shape[0]), expected)
    return single(f"{'x'.join(map(str, shape))},scale{scale:g},eps{eps:g}", "rms_norm", dtype, make)


def rope_case(heads: int, dim: int, positions: tuple[int, ...], scale: float, dtype: str,
              nmse: dict[str, float]) -> OpCase:
    """Each pair (i, i + dim / 2) of a head is a complex number, turned by position * inv_freq[i]."""
    spec = RopeSpec(tuple(10000.0 ** (-2 * i / dim) for i in range(dim // 2)), scale)

    def make(rng: np.random.Generator) -> tuple:
        x = normal(rng, (len(positions), heads, dim), dtype)
        turned = x[..., :dim // 2] + 1j * x[..., dim // 2:]
        for t, position in enumerate(positions):
            for i, frequency in enumerate(spec.inv_freq):
                turned[t, :, i] *= scale * complex(math.cos(position * frequency), math.sin(position * frequency))
        return ({"x": table(x)},
                lambda ops, w, batch: ops.rope(ops.embed(batch.tokens, w["x"]).reshape(-1, heads, dim), spec),
                token_batch(len(positions), np.array(positions)), np.concatenate([turned.real, turned.imag], -1))
    return single(f"{heads}x{dim},to{max(positions)},scale{scale:g}", "rope", dtype, make, nmse=nmse[dtype])


def act(x: float, kind: str) -> float:
    if kind == "silu":
        return x / (1 + math.exp(-x)) if x > -700 else 0.0
    if kind == "gelu":
        return 0.5 * x * math.erfc(-x / math.sqrt(2))
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def act_case(kind: str, dtype: str) -> OpCase:
    def make(rng: np.random.Generator) -> tuple:
        gate, up = normal(rng, (6, 64), dtype, 3), normal(rng, (6, 64), dtype)
        gate[0, :6] = rounded([0, 100, -100, 1e4, -1e4, 30], dtype)  # where a naive exp overflows
        return ({"gate": table(gate), "up": table(up)},
                lambda ops, w, batch: ops.act_mul(*(ops.embed(batch.tokens, w[name]) for name in ("gate", "up")), kind),
                token_batch(6), np.vectorize(act)(gate, kind) * up)
    return single(kind, "act_mul", dtype, make)


def all_reduce_case(dtype: str) -> OpCase:
    def make(rng: np.random.Generator) -> tuple:
        x = normal(rng, (3, 32), dtype)
        return {"x": table(x)}, lambda ops, w, batch: ops.all_reduce(ops.embed(batch.tokens, w["x"])), token_batch(3), x
    return single("one_rank", "all_reduce", dtype, make)


# Sparse feed-forward.

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


def moe_case(name: str, spec: MoESpec, tokens: int, dtype: str, format: str = "f32", ties: bool = False) -> OpCase:
    width, inner = 64, 96

    def make(rng: np.random.Generator) -> tuple:
        w13, dense13 = quantized(rng, format, (spec.experts, 2 * inner, width))
        w2, dense2 = quantized(rng, format, (spec.experts, width, inner))
        x, router = normal(rng, (tokens, width), dtype), normal(rng, (tokens, spec.experts), dtype)
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
        return ({"x": table(x), "router": table(router), "w13": parts([w13], "experts"), "w2": parts([w2], "experts")},
                forward, token_batch(tokens), expected)
    return single(name, "moe", dtype, make, {"experts": spec.experts, "top_k": spec.top_k, "format": format},
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
    for format in ("bf16", "q4_1", "q8_0"):
        yield moe_case(f"softmax,{format}", MoESpec(4, 2), 6, dtype, format)


def dense_cases(dtype: str) -> Iterator[OpCase]:
    """Every case of the ops that look at one token at a time."""
    for name in ("f32", "f16", "bf16", "q4_1", "q8_0", "q6_k"):
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
    for kind in ("silu", "gelu_tanh", "gelu"):
        yield act_case(kind, dtype)
    yield all_reduce_case(dtype)
    yield from moe_cases(dtype)
