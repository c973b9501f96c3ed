"""Cases of paged attention: sequences that grow over three launches, on shuffled pages that all have an owner.

First launch: prompts. Second: two decode tokens, a fresh prompt and a later chunk in one token axis, with padding.
Third: one token for everyone, also for the bystanders: they wrote in the first launch and rested in the second, and no
page but page 0 is without an owner, so a write to a wrong page shows in what its owner reads.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.plan import Batch, Sampling
from ..core.platform import AttentionSpec, LayerState, StateSpec
from ..core.specs import KV_FORMATS
from .case import random_source
from .kept import SMALL, kept, kv_nmse
from .opcase import NMSE, QUANTIZED_NMSE, Entry, OpCase, Run, Step, normal, table

LAYERS = 2


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    page_size: int
    scale: float = 1.0  # of the queries
    kv: str = ""        # dtype of K and V where it is another than the computation's
    size: float = 1.0   # of K and V
    scales: tuple[float, float] = (1.0, 1.0)  # of K and V as they are kept


def growth(page: int) -> dict[int, tuple[int, int, int]]:
    """Sequence slot -> new tokens in each of the three launches. 2 and 6 are bystanders. Of large pages fewer, so that
    a launch is no more than platforms take in a step."""
    large = page > 64
    return {1: ((1 if large else 2) * page, 1, 1),      # its decode token opens a page
            2: ((1 if large else 3) * page - 1, 0, 1),  # its last token fills a page
            3: (page + 1, 1, 1),
            4: (page // 2 + 1, page + 2, 1),            # a prompt in two chunks
            5: (0, 3, 1),                               # a prompt that comes later
            6: (1, 0, 1)}                               # a prompt of one token


def page_tables(rng: np.random.Generator, page: int) -> tuple[dict[int, list[int]], int]:
    """Shuffled pages 1 ... for every sequence, just enough; and the number of pages in all."""
    need = {seq: -(-sum(new) // page) for seq, new in growth(page).items()}
    shuffled = iter(rng.permutation(sum(need.values())) + 1)
    return {seq: [int(next(shuffled)) for _ in range(n)] for seq, n in need.items()}, sum(need.values()) + 1


def launch_batch(new: dict[int, int], before: dict[int, int], pages: dict[int, list[int]], page: int,
                 padding_tokens: int, padding_rows: int) -> Batch:
    """Rows of the sequences that have new tokens, those with one token first; then padding."""
    order = sorted((seq for seq in new if new[seq]), key=lambda seq: (new[seq] > 1, seq))
    positions, slots, rows = [], [], []
    for row, seq in enumerate(order):
        for position in range(before[seq], before[seq] + new[seq]):
            positions.append(position)
            slots.append(pages[seq][position // page] * page + position % page)
            rows.append(row)
    count = len(positions)
    starts = [rows.index(row) for row in range(len(order))] + [count] * (1 + padding_rows)
    width = max(len(pages[seq]) for seq in order) + 1
    tables = np.zeros((len(order) + padding_rows, width), np.int32)
    for row, seq in enumerate(order):
        used = -(-(before[seq] + new[seq]) // page)
        tables[row, :used] = pages[seq][:used]
    pad = [0] * padding_tokens
    array = lambda values: np.array(values, np.int32)  # noqa: E731
    return Batch(tokens=np.arange(count + padding_tokens, dtype=np.int32), positions=array(positions + pad),
                 slots=array(slots + pad), rows=array(rows + [len(tables) - 1] * padding_tokens),
                 seqs=array(order + [0] * padding_rows), starts=array(starts),
                 lengths=array([before[seq] + new[seq] for seq in order] + [0] * padding_rows), pages=tables,
                 logit_rows=array([0]), targets=array([-2]), sampling=Sampling())


class Inputs:
    """Queries, keys and values of all launches in three tables, so that one forward with one set of weights serves
    every launch and is compiled once for each size."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, ...]] = []
        self._count = 0

    def add(self, batch: Batch, *parts: np.ndarray) -> Batch:
        """The batch with token numbers that stand for these inputs, which are one for each of its tokens."""
        first, self._count = self._count, self._count + len(batch.tokens)
        self._parts.append(parts)
        return batch._replace(tokens=np.arange(first, self._count, dtype=np.int32))

    def weights(self) -> dict[str, Entry]:
        return {name: table(np.concatenate(parts)) for name, parts in
                zip("qkv", zip(*self._parts, strict=True), strict=True)}


def attended(q: np.ndarray, keys: np.ndarray, values: np.ndarray, spec: AttentionSpec) -> np.ndarray:
    """One token, the last of its context: q [heads, d], keys and values [context, kv_heads, d]."""
    out = np.zeros_like(q)
    first = 0 if spec.window is None else max(0, len(keys) - spec.window)
    for head in range(len(q)):
        kv = head // (len(q) // keys.shape[1])
        scores = keys[first:, kv] @ q[head] * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * np.tanh(scores / spec.softcap)
        shares = np.exp(scores - scores.max())
        out[head] = shares @ values[first:, kv] / shares.sum()
    return out


def attend_forward(shape: Shape, specs: list[AttentionSpec]) -> Any:
    """All layers read the same inputs, each from its own cache; the sum tells them apart by their spec and weights."""
    def forward(ops: Any, w: Any, batch: Batch) -> Any:
        q, k, v = (ops.embed(batch.tokens, w[name]).reshape(-1, heads, shape.dim)
                   for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)))
        return (ops.attention(q, k, v, 0, specs[0]) - ops.attention(k=v, v=k, q=q, layer=1, spec=specs[1]))
    return forward


def build(shape: Shape, specs: list[AttentionSpec], dtype: str, padding: tuple[int, int], poison: bool,
          move: Any, seed: int) -> Run:
    rng = random_source(seed, f"attention {shape.heads} {shape.page_size}")
    page, plan = shape.page_size, growth(shape.page_size)
    pages, total = page_tables(rng, page)
    keys = {seq: np.zeros((0, shape.kv_heads, shape.dim)) for seq in plan}
    values = dict(keys)
    inputs, steps, before, forward = Inputs(), [], dict.fromkeys(plan, 0), attend_forward(shape, specs)
    for launch in range(3):
        new = {seq: plan[seq][launch] for seq in plan}
        hook = None
        if move and launch == 2:
            hook, pages = move(pages, total)
        batch = launch_batch(new, before, pages, page, *(padding if launch == 1 else (0, 0)))
        count, real = len(batch.tokens), sum(new.values())
        q = normal(rng, (count, shape.heads, shape.dim), dtype, shape.scale)
        k, v = (normal(rng, (count, shape.kv_heads, shape.dim), dtype, shape.size).clip(-6e4, 6e4) for _ in "kv")
        left_k, left_v = (scale * kept(part / scale, shape.kv or dtype)
                          for part, scale in zip((k, v), shape.scales, strict=True))
        expected = np.zeros((real, shape.heads, shape.dim))
        for token in range(real):
            seq = int(batch.seqs[batch.rows[token]])
            keys[seq] = np.concatenate([keys[seq], left_k[token:token + 1]])
            values[seq] = np.concatenate([values[seq], left_v[token:token + 1]])
            expected[token] = (attended(q[token], keys[seq], values[seq], specs[0])
                               - attended(q[token], values[seq], keys[seq], specs[1]))
        if poison:
            k[real:], v[real:] = np.nan, np.nan  # page 0 is never read by a real row
        steps.append(Step(forward, inputs.add(batch, q, k, v), expected, real, hook))
        before = {seq: before[seq] + new[seq] for seq in plan}
    layers = tuple(LayerState(shape.kv_heads, shape.dim, *scales) for scales in (shape.scales, shape.scales[::-1]))
    spec = StateSpec(layers, shape.kv or dtype, page, len(plan) + 1)
    return Run(inputs.weights(), steps, spec, 2 * total if move else total)


def case(name: str, shape: Shape, dtype: str, window: int | None = None, softcap: float | None = None,
         padding: tuple[int, int] = (5, 2), poison: bool = False, move: Any = None, factor: float = 1.0,
         nmse: float | None = None, **more: Any) -> OpCase:
    """Layer 0 has the window and the cap, layer 1 neither. factor: on the scale of the scores."""
    scale = factor / math.sqrt(shape.dim)
    specs = [AttentionSpec(scale, window, softcap), AttentionSpec(scale)]
    features = ("sliding_window",) * (window is not None) + ("softcap",) * (softcap is not None)
    asks = {"head_dim": shape.dim, "heads": shape.heads, "kv_heads": shape.kv_heads, "page_size": shape.page_size,
            "window": window, "softcap": softcap, "dtype": dtype}
    return OpCase(f"attention[{name},{shape.heads}/{shape.kv_heads}x{shape.dim},page{shape.page_size},{dtype}]",
                  "attention", dtype, lambda seed: build(shape, specs, dtype, padding, poison, move, seed), asks,
                  features + more.get("features", ()), NMSE[dtype] if nmse is None else nmse, shape.page_size, shape.kv)


def copied(pages: dict[int, list[int]], total: int) -> tuple[Any, dict[int, list[int]]]:
    """Every page copied to a fresh one, which the sequences use from then on."""
    moved = {seq: [page + total for page in mine] for seq, mine in pages.items()}
    source = [page for mine in pages.values() for page in mine]

    def copy(platform: Any, state: Any) -> Any:
        return platform.copy_pages(state, source, [page + total for page in source])
    return copy, moved


def exported(pages: dict[int, list[int]], total: int) -> tuple[Any, dict[int, list[int]]]:
    """Every page taken to the host and put back elsewhere, in another order."""
    source = [page for mine in pages.values() for page in mine]
    target = {page: total + 1 + i for i, page in enumerate(reversed(sorted(source)))}

    def export(platform: Any, state: Any) -> Any:
        data = platform.export_pages(state, source)
        return platform.import_pages(state, [target[page] for page in source], data)
    return export, {seq: [target[page] for page in mine] for seq, mine in pages.items()}


def attention_cases(dtype: str) -> Iterator[OpCase]:
    yield case("mha", Shape(4, 4, 16, 16), dtype)
    yield case("gqa", Shape(6, 2, 32, 16), dtype)
    yield case("mqa", Shape(8, 1, 64, 16), dtype)
    for page in (1, 2, 4, 8, 32, 64, 128, 256):
        yield case("gqa", Shape(6, 2, 32, page), dtype)
    for window in (1, 7, 1000):
        yield case(f"window{window}", Shape(4, 2, 32, 16), dtype, window=window)
    yield case("window7", Shape(4, 2, 32, 4), dtype, window=7)
    yield case("softcap", Shape(4, 2, 32, 16, scale=8.0), dtype, softcap=5.0)
    yield case("window7,softcap", Shape(4, 2, 32, 1, scale=8.0), dtype, window=7, softcap=5.0)
    yield case("wide_head", Shape(4, 1, 256, 16), dtype)
    yield case("no_padding", Shape(4, 2, 32, 16), dtype, padding=(0, 0))
    yield case("padding_rows", Shape(4, 2, 32, 16), dtype, padding=(0, 3))
    yield case("page0_nan", Shape(4, 2, 32, 16), dtype, poison=True)
    yield case("copied_pages", Shape(4, 2, 32, 16), dtype, move=copied)
    yield case("exported_pages", Shape(4, 2, 32, 4), dtype, move=exported, features=("export_pages",))
    if dtype != "bf16":  # in f16 the scaled queries may be rounded once more, which moves scores by 200 * 2^-12
        yield case("large_scores", Shape(4, 2, 32, 16, scale=200.0), dtype,
                   nmse=QUANTIZED_NMSE[dtype] if dtype == "f16" else None)
    if dtype == "f16":  # products beyond its 65504, scores as everywhere
        yield case("large_products", Shape(4, 2, 32, 16, scale=4000.0), dtype, factor=1 / 4000)
    for kv in KV_FORMATS:
        if kv != dtype:
            yield from kv_cases(dtype, kv)


def kv_cases(dtype: str, kv: str) -> Iterator[OpCase]:
    """K and V kept in another dtype than is computed in. beyond_range: values larger than it holds, small scores.
    scaled: values that are nothing in it unless they are divided by their scale."""
    nmse = kv_nmse(dtype, kv)
    yield case(f"copied_pages,kv_{kv}", Shape(4, 2, 32, 16, kv=kv), dtype, move=copied, nmse=nmse)
    yield case(f"exported_pages,kv_{kv}", Shape(4, 2, 32, 4, kv=kv), dtype, move=exported, nmse=nmse,
               features=("export_pages",))
    if kv in SMALL and not (dtype == "f16" and 2 * SMALL[kv][2] > 65504):  # a difference of two layers must fit
        size = SMALL[kv][2] / 3
        yield case(f"beyond_range,kv_{kv}", Shape(4, 2, 32, 16, kv=kv, size=size), dtype, factor=1 / size, nmse=nmse)
    if kv in SMALL and not (dtype == "f16" and SMALL[kv][1] < -6):  # which has no more digits there
        size = 2.0 ** (SMALL[kv][1] - SMALL[kv][0] - 1)
        yield case(f"scaled,kv_{kv}", Shape(4, 2, 32, 16, kv=kv, size=size, scales=(0.4 * size, 0.7 * size)), dtype,
                   factor=1 / size, nmse=nmse, features=("kv_scales",))
