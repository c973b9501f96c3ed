"""Steps on a platform through nothing but the neck: batches as the engine makes them, and what a step takes."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..plan import Batch, Sampling
from ..platform import Manifest
from ..quant.formats import FORMATS
from ..specs import RawTensor, Role, StateSpec, WeightSpec

SETTLE, FEWEST, MOST = 2, 5, 200  # steps: before the clock runs, and timed
SPAN_S = 0.5                      # that is timed, as far as `FEWEST` and `MOST` allow
DRAWN = 1 << 18                   # random values, repeated


def make_batch(rows: int, tokens: int, context: int, page_size: int, vocab: int, logits: bool = True) -> Batch:
    """`rows` rows of `tokens` new tokens each, whose contexts have `context` tokens with them; pages in random order,
    page 0 left out. The last token of a row is sampled from, greedily; without `logits` only that of the last row."""
    each = -(-context // page_size)
    table = np.random.default_rng(0).permutation(rows * each).reshape(rows, each) + 1
    position = np.tile(np.arange(context - tokens, context), rows)
    row = np.repeat(np.arange(rows), tokens)
    slots = table[row, position // page_size] * page_size + position % page_size
    starts = np.arange(rows + 1) * tokens
    last = (starts[1:] if logits else starts[-1:]) - 1
    arrays = (np.arange(rows * tokens) % min(vocab, 97), position, slots, row, np.arange(1, rows + 1), starts,
              np.full(rows, context), table, last, np.full(len(last), -1))
    return Batch(*(np.ascontiguousarray(part, np.int32) for part in arrays), Sampling())


def pages_of(batch: Batch) -> int:
    """Pages that a state must have for it, page 0 included."""
    return int(batch.pages.max()) + 1


@dataclass(frozen=True)
class Place:
    """A probed platform. dtype: that is computed in."""

    platform: Any
    manifest: Manifest
    dtype: str

    @property
    def page_size(self) -> int:
        return self.manifest.page_sizes[0]

    def weight(self, shape: Sequence[int], role: Role = "linear", form: str = "", seed: int = 0) -> Any:
        """A leaf of random values that keep the size of what they meet. form: a dense dtype, q8_0 or q4_0."""
        return self.platform.load([raw_tensor(tuple(shape), form or self.dtype, seed)],
                                  WeightSpec(("weight",), role), self.dtype)

    def timed(self, forward: Callable[..., Any], weights: Any, batch: Batch, state: StateSpec,
              steps: int | None = None) -> Timing:
        """What a step of this forward takes. Raises what the platform raises."""
        from ...conformance.fitting import fitted
        batch, bucket = fitted(batch, self.manifest.buckets)
        step, memory = self.platform.compile(forward, weights, bucket), self.platform.alloc(state, pages_of(batch))
        return time_steps(step, memory, batch, "overlap" in self.manifest.features, steps)


@dataclass(frozen=True)
class Timing:
    """Seconds: of the first step with all that is built in it, and of each later one."""

    first: float
    steps: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.steps)

    @property
    def spread(self) -> float:
        """From the first quartile to the third, as a share of the median."""
        low, _, high = statistics.quantiles(self.steps, n=4)
        return (high - low) / self.median


def time_steps(step: Callable[..., Any], state: Any, batch: Batch, overlap: bool, steps: int | None = None) -> Timing:
    """From one result to the next; with `overlap` each is launched before the one before it is collected, as the engine
    does."""
    began = time.perf_counter()
    out, state = step(state, batch)
    out.collect()
    first = time.perf_counter() - began
    for _ in range(SETTLE):
        began = time.perf_counter()
        out, state = step(state, batch)
        out.collect()
        once = time.perf_counter() - began
    count = steps or max(FEWEST, min(MOST, int(SPAN_S / max(once, 1e-9))))
    times, waiting = [], None
    if overlap:
        waiting, state = step(state, batch)
    for _ in range(count):
        began = time.perf_counter()
        launched, state = step(state, batch)
        (waiting if overlap else launched).collect()
        waiting = launched
        times.append(time.perf_counter() - began)
    if overlap:
        waiting.collect()
    return Timing(first, times)


def raw_tensor(shape: tuple[int, ...], form: str, seed: int = 0) -> RawTensor:
    """Random values in a checkpoint's format, about 1 / sqrt(in) in size; the bytes are its own."""
    count, width = int(np.prod(shape)), shape[-1]
    values = np.random.default_rng(seed).normal(size=DRAWN).astype(np.float32) / np.float32(width ** 0.5)
    if form == "bf16":
        return RawTensor(form, shape, np.resize((values.view(np.uint32) >> 16).astype("<u2"), count).view(np.uint8))
    dense = {"f64": "<f8", "f32": "<f4", "f16": "<f2"}
    if form in dense:
        return RawTensor(form, shape, np.resize(values.astype(dense[form]), count).view(np.uint8))
    block, nbytes = FORMATS[form].block, FORMATS[form].block_bytes
    codes = np.random.default_rng(seed).integers(0, 256, DRAWN, dtype=np.uint8)
    blocks = np.resize(codes, count // block * nbytes).reshape(-1, nbytes)
    scale = np.float16(width ** -0.5 / 2 ** (FORMATS[form].bits - 1))
    blocks[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return RawTensor(form, shape, blocks.reshape(-1))
