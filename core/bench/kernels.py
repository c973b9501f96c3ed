"""Each op of a platform through the neck, beside the framework's own where the platform names one.

An op is repeated inside one step, each time on what the one before gave, so that none can be left out; what the step
costs beside is taken off by a step with one of them. A platform compiles these steps as it compiles a model's.

A platform may have a module `peers` in its folder, or beside its own in its package, with
`peer(op, dtype, **case) -> function(count) or None`: the function does the same `count` times with the framework's own
operators, and waits until it is done. The cases are those of `cases`.
"""
from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..discovery import list_platforms
from ..platform import AttentionSpec, Batch, LayerState, MoESpec, Ops, RopeSpec, Tensor, Unsupported
from ..quant.formats import FORMATS
from ..specs import StateSpec
from .ceilings import Ceilings, rate_of
from .result import Run
from .steps import Place, make_batch

COUNTS = (8, 64, 512)    # of an op in one step; the first that can be told from one
CLEAR = 0.5              # of a step's time that the ops must have
CACHED = 64 << 20        # bytes of weights used in turn, so that no cache holds them
MOST_COPIES = 32
PEER_S = 0.05            # that a peer is timed for, several times
VOCAB = 64
Peer = Callable[..., Callable[[int], None] | None]


@dataclass(frozen=True)
class Shape:
    """Widths of a model's layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 8
    top_k: int = 2


SHAPES = {"135m": Shape(576, 9, 3, 64, 1536, 49152), "1b": Shape(2048, 32, 8, 64, 8192, 128_256),
          "8b": Shape(4096, 32, 8, 128, 14336, 128_256)}


@dataclass(frozen=True)
class Case:
    """An op with its sizes. facts: what a peer is told.  body: `count` times of it on x [T, width].

    nbytes, operations: of one call, at least.  form: of the weight, where it has one.
    """

    op: str
    label: str
    rows: int
    tokens: int
    context: int
    width: int
    out: int
    weights: Callable[[Place, int], Mapping[str, Any]]
    body: Callable[[Ops, Tensor, Mapping[str, Any], Batch, int], Tensor]
    facts: Mapping[str, Any]
    nbytes: float
    operations: float
    form: str = ""


def cases(place: Place, shape: Shape, tokens: list[int], context: int) -> Iterator[Case]:
    """Every op of the neck that one rank has, at each number of tokens; attention as a decode of so many rows behind
    `context` tokens, and as a prefill of so many."""
    value = {"f64": 8, "f32": 4}.get(place.dtype, 2)
    forms = [place.dtype, *(form for form in ("q8_0", "q4_0") if form in place.manifest.formats)]
    hidden, q = shape.hidden, shape.heads * shape.head_dim
    for count in tokens:
        for name, out, width in (("qkv", q + 2 * shape.kv_heads * shape.head_dim, hidden), ("o", hidden, q),
                                 ("gate_up", 2 * shape.intermediate, hidden), ("down", hidden, shape.intermediate)):
            for form in forms:
                yield _linear(place, name, out, width, count, form, value)
        yield _embed(shape, count, value)
        yield from _elementwise(shape, count, value)
        yield _attention(shape, count, 1, context, value)
        if count > 1:
            yield _attention(shape, 1, count, count, value)
        yield _moe(shape, count, value)
        yield _sample(shape, count, value)


def _linear(place: Place, name: str, out: int, width: int, tokens: int, form: str, value: int) -> Case:
    size = out * width * FORMATS[form].block_bytes / FORMATS[form].block

    def weights(place: Place, count: int) -> Mapping[str, Any]:
        copies = max(1, min(count, MOST_COPIES, int(CACHED / size) + 1))
        return {"each": [place.weight((out, width), form=form, seed=i) for i in range(copies)]}

    def body(ops: Ops, x: Tensor, weights: Mapping[str, Any], batch: Batch, count: int) -> Tensor:
        each = weights["each"]
        y = ops.linear(x, each[0])
        for i in range(1, count):
            y = y + ops.linear(x, each[i % len(each)])
        return y
    return Case("linear", f"linear {name} {out} x {width} {form}", 1, tokens, tokens, width, out, weights, body,
                {"tokens": tokens, "inputs": width, "outputs": out}, size + value * tokens * (out + width),
                2.0 * tokens * out * width, form)


def _none(place: Place, count: int) -> Mapping[str, Any]:
    return {}


def _embed(shape: Shape, tokens: int, value: int) -> Case:
    def body(ops: Ops, x: Tensor, weights: Mapping[str, Any], batch: Batch, count: int) -> Tensor:
        for _ in range(count):
            x = x + ops.embed(batch.tokens, weights["table"])
        return x
    return Case("embed", f"embed {shape.vocab} x {shape.hidden}", 1, tokens, tokens, shape.hidden, shape.hidden,
                lambda place, count: {"table": place.weight((shape.vocab, shape.hidden), "embed")}, body,
                {"tokens": tokens, "vocab": shape.vocab, "width": shape.hidden}, 3.0 * value * tokens * shape.hidden, 0)


def _elementwise(shape: Shape, tokens: int, value: int) -> Iterator[Case]:
    hidden, wide = shape.hidden, shape.intermediate
    rope = RopeSpec(tuple(10_000.0 ** (-2 * i / shape.head_dim) for i in range(shape.head_dim // 2)))

    def norms(ops: Ops, x: Tensor, weights: Mapping[str, Any], batch: Batch, count: int) -> Tensor:
        for _ in range(count):
            x = ops.rms_norm(x, weights["norm"], 1e-5)
        return x

    def turns(ops: Ops, x: Tensor, weights: Mapping[str, Any], batch: Batch, count: int) -> Tensor:
        x = x.reshape(x.shape[0], shape.heads, shape.head_dim)
        for _ in range(count):
            x = ops.rope(x, rope)
        return x.reshape(x.shape[0], shape.heads * shape.head_dim)

    def gates(ops: Ops, x: Tensor, weights: Mapping[str, Any], batch: Batch, count: int) -> Tensor:
        for _ in range(count):
            x = ops.act_mul(x, x, "silu")
        return x
    q = shape.heads * shape.head_dim
    yield Case("rms_norm", f"rms_norm {hidden}", 1, tokens, tokens, hidden, hidden,
               lambda place, count: {"norm": place.weight((hidden,), "norm")}, norms,
               {"tokens": tokens, "width": hidden}, 2.0 * value * tokens * hidden, 4.0 * tokens * hidden)
    yield Case("rope", f"rope {shape.heads} x {shape.head_dim}", 1, tokens, tokens, q, q, _none, turns,
               {"tokens": tokens, "heads": shape.heads, "head_dim": shape.head_dim}, 2.0 * value * tokens * q,
               6.0 * tokens * q)
    yield Case("act_mul", f"act_mul {wide}", 1, tokens, tokens, wide, wide, _none, gates,
               {"tokens": tokens, "width": wide}, 3.0 * value * tokens * wide, 5.0 * tokens * wide)


def _attention(shape: Shape, rows: int, tokens: int, context: int, value: int) -> Case:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    spec = AttentionSpec(shape.head_dim ** -0.5)

    def body(ops: Ops, x: Tensor, weights: Mapping[str, Any], batch: Batch, count: int) -> Tensor:
        keys = x[:, 0:kv].reshape(x.shape[0], shape.kv_heads, shape.head_dim)
        y = x.reshape(x.shape[0], shape.heads, shape.head_dim)
        for _ in range(count):
            y = ops.attention(y, keys, keys, 0, spec)
        return y.reshape(x.shape[0], q)
    seen = context if tokens == 1 else (context + 1) / 2
    name = f"attention, decode behind {context}" if tokens == 1 else "attention, prefill"
    return Case("attention", name, rows, tokens, context, q, q, _none, body,
                {"rows": rows, "tokens": tokens, "context": context, "heads": shape.heads, "kv_heads": shape.kv_heads,
                 "head_dim": shape.head_dim}, 2.0 * value * rows * context * kv, 4.0 * rows * tokens * seen * q)


def _moe(shape: Shape, tokens: int, value: int) -> Case:
    experts, inner, hidden = shape.experts, shape.intermediate // 4, shape.hidden
    spec = MoESpec(experts, shape.top_k)

    def weights(place: Place, count: int) -> Mapping[str, Any]:
        return {"router": place.weight((experts, hidden)), "w13": place.weight((experts, 2 * inner, hidden), "experts"),
                "w2": place.weight((experts, hidden, inner), "experts")}

    def body(ops: Ops, x: Tensor, weights: Mapping[str, Any], batch: Batch, count: int) -> Tensor:
        router = ops.linear(x, weights["router"])
        for _ in range(count):
            x = ops.moe(x, router, weights["w13"], weights["w2"], spec)
        return x
    met = experts * (1 - (1 - spec.top_k / experts) ** tokens)
    return Case("moe", f"moe {spec.top_k} of {experts} x {inner}", 1, tokens, tokens, hidden, hidden, weights, body,
                {"tokens": tokens, "width": hidden, "inner": inner, "experts": experts, "top_k": spec.top_k},
                3.0 * value * met * inner * hidden, 6.0 * tokens * spec.top_k * inner * hidden)


def _sample(shape: Shape, rows: int, value: int) -> Case:
    """The head and the choice of a token for each row: the step's end, which every step has once."""
    return Case("sample", f"head and sample {shape.vocab}", rows, 1, 1, shape.hidden, shape.hidden,
                lambda place, count: {"head": place.weight((shape.vocab if count else VOCAB, shape.hidden))},
                lambda ops, x, weights, batch, count: x,
                {"rows": rows, "vocab": shape.vocab, "width": shape.hidden},
                1.0 * value * shape.vocab * (shape.hidden + rows), 2.0 * rows * shape.vocab * shape.hidden)


def time_case(place: Place, case: Case) -> float:
    """Seconds of one call. Raises `Unsupported`, and whatever else the platform raises."""
    if case.op == "moe" and "moe" not in place.manifest.features:
        raise Unsupported(f"{place.manifest.name} has no sparse layers")
    whole = case.op == "sample"
    batch = make_batch(case.rows, case.tokens, case.context, place.page_size, VOCAB, logits=whole)
    state = StateSpec((LayerState(case.facts.get("kv_heads", 1), case.facts.get("head_dim", 64)),),
                      place.dtype if place.dtype in place.manifest.kv_dtypes else place.manifest.kv_dtypes[0],
                      place.page_size, case.rows + 1)
    embed = place.weight((VOCAB, case.width), "embed")

    def seconds(count: int) -> float:
        weights = {"embed": embed, "head": None, **case.weights(place, count)}
        weights["head"] = weights["head"] or (embed if case.width == case.out else place.weight((VOCAB, case.out)))

        def forward(ops: Ops, weights: Mapping[str, Any], batch: Batch) -> Tensor:
            x = case.body(ops, ops.embed(batch.tokens, weights["embed"]), weights, batch, count)
            return ops.sample(ops.linear(x[batch.logit_rows], weights["head"]))
        return place.timed(forward, weights, batch, state).median
    if whole:
        many, none = seconds(1), seconds(0)
        return many - none if many > none else many
    one = seconds(1)
    for count in COUNTS:
        many = seconds(count)
        if many - one >= CLEAR * many:
            break
    return 1 / rate_of(count, many, one)


def find_peer(name: str) -> Peer | None:
    """The platform's `peer`, if it has one. Raises what its module raises."""
    entry = list_platforms()[name].entry
    package = entry.module.rpartition(".")[0] if entry else f"{__package__.rpartition('.core.')[0]}.platforms.{name}"
    where = f"{package}.peers" if package else "peers"
    if not package or importlib.util.find_spec(where) is None:
        return None
    return importlib.import_module(where).peer


def time_peer(call: Callable[[int], None]) -> float:
    """Seconds of one call, from several spans of so many."""
    call(2)
    began = time.perf_counter()
    call(2)
    count = max(1, int(PEER_S / max((time.perf_counter() - began) / 2, 1e-7)))
    spans = []
    for _ in range(5):
        began = time.perf_counter()
        call(count)
        spans.append((time.perf_counter() - began) / count)
    return float(np.median(spans))


def measure(place: Place, case: Case, peer: Peer | None, roof: Ceilings) -> Run:
    """One op, its share of the roof, and the framework's own beside it."""
    seconds = time_case(place, case)
    figures = {"us": 1e6 * seconds, "gb_per_s": case.nbytes / seconds / 1e9,
               "roof_share": roof.seconds(case.nbytes, case.operations) / seconds}
    if case.operations:
        figures["tflop_per_s"] = case.operations / seconds / 1e12
    detail: dict[str, Any] = {"op": case.op, "format": case.form, **case.facts}
    call = peer(case.op, place.dtype, **case.facts) if peer is not None else None
    if call is not None:
        detail["peer_us"] = 1e6 * time_peer(call)
        figures["peer_ratio"] = detail["peer_us"] / figures["us"]
    size = case.facts.get("rows", 1) * case.facts.get("tokens", 1)
    return Run(f"{case.label}, {size} token{'s' * (size > 1)}", figures, detail)
