"""The null platform: no device, no model, no time. It runs scheduler, server and soak tests in milliseconds.

Its "model" is a hash: the next token is a function of every token in the row's context, read back through the page
table. A page that was lost, shared wrongly or overwritten therefore changes the text, and `next_token` says what is
right. It also checks every number of a batch. Options: check=0: no checks, and a token depends on its place alone;
delay_ms=5 makes each step take that long; lacks=logprobs+penalties leaves features out.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.platform import (
    FEATURES,
    INTERFACE_VERSION,
    Batch,
    Bucket,
    Manifest,
    Mask,
    RawTensor,
    StateSpec,
    StepResult,
    Unavailable,
    WeightSpec,
)
from ..options import check_options

UNWRITTEN = -1
_BASE = np.uint64(0x9E3779B97F4A7C15)


def next_token(context: np.ndarray, vocab: int) -> int:
    """The token that follows `context` (int32 [n]): a polynomial hash modulo 2^64, folded to 0 .. vocab - 1."""
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(len(context), _BASE))[::-1]
        digest = int((powers * (context.astype(np.uint64) + np.uint64(1))).sum())
    digest ^= digest >> 29
    return (digest * 0xBF58476D1CE4E5B9 % 2**64 >> 32) % vocab


def nearest(token: int, allowed: np.ndarray | None) -> int:
    """The token, or the first one after it, in a circle, that is allowed."""
    return token if allowed is None else int((token + np.roll(allowed, -token).argmax()) % len(allowed))


def allowed_tokens(mask: Mask) -> np.ndarray:
    """bool [M, 32 * words]; waits for the mask. Raises AssertionError for a row that allows nothing."""
    mask.ready()
    bits = np.unpackbits(mask.bits.astype("<u4", copy=False).view(np.uint8), axis=1, bitorder="little").astype(bool)
    empty = np.flatnonzero(~bits.any(1))
    assert not len(empty), f"the mask of logit row {mask.rows[empty[0]]} allows no token"
    return bits


@dataclass
class State:
    """Token and position written to each slot, and the last token of each sequence slot."""

    page_size: int
    tokens: np.ndarray     # [pages * page_size] int32
    positions: np.ndarray  # [pages * page_size] int32
    last: np.ndarray       # [seqs] int32, UNWRITTEN until a token was sampled


class Launched:
    """A step that has been given to the worker thread."""

    def __init__(self, future: Future[StepResult]):
        self._future = future

    def collect(self) -> StepResult:
        return self._future.result()


SPREAD = 48_271  # a prime: neighbouring places have different tokens


def _number(options: Mapping[str, str], name: str, default: int) -> int:
    value = options.get(name, str(default))
    if not value.isdecimal() or len(value) > 9:
        raise Unavailable(f"{name}={value!r}: a whole number is needed")
    return int(value)


class Platform:
    """A device that needs no time and forgets nothing."""

    interface_version = INTERFACE_VERSION

    def __init__(self, options: Mapping[str, str]):
        check_options("null", options, ("check", "delay_ms", "vocab", "lacks"))
        self._check = options.get("check", "1") != "0"
        self._delay = _number(options, "delay_ms", 0) / 1e3
        self._vocab = _number(options, "vocab", 1000) or 1
        self._lacks = {"export_pages", *filter(None, options.get("lacks", "").split("+"))}
        if not self._lacks <= set(FEATURES):
            raise Unavailable(f"lacks={options['lacks']!r}: words of {', '.join(FEATURES)} are needed, with + between")
        self._worker = ThreadPoolExecutor(1, "null-device")

    def probe(self, rank: int = 0, world: int = 1) -> Manifest:
        if world != 1:
            raise Unavailable(f"the null platform runs in a single process; {world} ranks were asked for")
        return Manifest(name="null", device="no device", interface=INTERFACE_VERSION, compute_dtypes=("f32", "bf16"),
                        kv_dtypes=("bf16", "f32"), formats=(), page_sizes=(16, 1, 2, 4, 8, 32, 64, 128), buckets=None,
                        memory_total=2**34, memory_free=2**34, determinism="T0", rank=-1,
                        features=frozenset(FEATURES) - self._lacks)

    def supports(self, op: str, **case: Any) -> str | None:
        return "the null platform was made without it" if op in self._lacks else None

    def load(self, raws: Sequence[RawTensor], spec: WeightSpec, dtype: str) -> None:
        if spec.role == "embed":
            self._vocab = sum(raw.shape[0] for raw in raws)

    def alloc(self, spec: StateSpec, pages: int) -> State:
        slots = pages * spec.page_size
        return State(spec.page_size, np.full(slots, UNWRITTEN, np.int32), np.full(slots, UNWRITTEN, np.int32),
                     np.full(spec.seqs, UNWRITTEN, np.int32))

    def compile(self, forward: Callable[..., Any], weights: Any, bucket: Bucket | None) -> Callable[..., Any]:
        run = self._checked if self._check else self._constant

        def step(state: State, batch: Batch) -> tuple[Launched, State]:
            return Launched(self._worker.submit(run, state, batch, bucket)), state
        return step

    def copy_pages(self, state: State, src: Sequence[int], dst: Sequence[int]) -> State:
        def copy() -> None:
            for array in (state.tokens, state.positions):
                by_page = array.reshape(-1, state.page_size)
                by_page[list(dst)] = by_page[list(src)]
        self._worker.submit(copy).result()  # behind the steps that were launched before
        return state

    def close(self) -> None:
        self._worker.shutdown()

    def _constant(self, state: State, batch: Batch, bucket: Bucket | None) -> StepResult:
        if self._delay:
            time.sleep(self._delay)
        spread = batch.positions[batch.logit_rows].astype(np.int64) * SPREAD % self._vocab
        tokens = np.where(batch.targets < 0, spread, batch.targets).astype(np.int32)
        if batch.sampling.mask is not None:
            tokens[batch.sampling.mask.rows] = allowed_tokens(batch.sampling.mask).argmax(1)
        return self._result(tokens, batch)

    def _checked(self, state: State, batch: Batch, bucket: Bucket | None) -> StepResult:
        if self._delay:
            time.sleep(self._delay)
        real = int(batch.starts[-1])
        tokens = self._inputs(state, batch, real)
        check_batch(batch, state.page_size, bucket)
        state.tokens[batch.slots[:real]], state.positions[batch.slots[:real]] = tokens, batch.positions[:real]
        out, mask = np.zeros(len(batch.targets), np.int32), batch.sampling.mask
        allowed = {} if mask is None else dict(zip(mask.rows.tolist(), allowed_tokens(mask), strict=True))
        for i, (row, target) in enumerate(zip(batch.logit_rows.tolist(), batch.targets.tolist(), strict=True)):
            if target == -2:
                continue
            context = self._context(state, batch, row)
            out[i] = self._next(context, batch, i, allowed.get(i)) if target == -1 else target
            if target == -1:
                state.last[batch.seqs[batch.rows[row]]] = out[i]
        return self._result(out, batch)

    def _next(self, context: np.ndarray, batch: Batch, i: int, allowed: np.ndarray | None) -> int:
        """The token of logit row `i` of the batch, which follows `context`: of those that its mask allows, bool [V]."""
        return nearest(next_token(context, self._vocab), allowed)

    def _inputs(self, state: State, batch: Batch, real: int) -> np.ndarray:
        last = state.last[batch.seqs[batch.rows[:real]]]
        tokens = np.where(batch.tokens[:real] < 0, last, batch.tokens[:real])
        assert (tokens >= 0).all(), "a token is to be taken from a sequence slot that has sampled none"
        assert (tokens < self._vocab).all(), f"token {tokens.max()} is outside the vocabulary of {self._vocab}"
        return tokens

    def _context(self, state: State, batch: Batch, row: int) -> np.ndarray:
        """Tokens 0 .. position of logit row `row`, read back through the page table."""
        positions = np.arange(batch.positions[row] + 1)
        pages = batch.pages[batch.rows[row], positions // state.page_size]
        slots = pages * state.page_size + positions % state.page_size
        wrong = np.flatnonzero(state.positions[slots] != positions)
        assert not len(wrong), (f"row {batch.rows[row]} reads position {wrong[0]} from slot {slots[wrong[0]]}, "
                                f"which holds position {state.positions[slots[wrong[0]]]}")
        return state.tokens[slots]

    def _result(self, tokens: np.ndarray, batch: Batch) -> StepResult:
        top = batch.sampling.top_logprobs
        if top is None:
            return StepResult(tokens)
        ids = np.tile(np.arange(len(top), dtype=np.int32), (len(tokens), 1))
        return StepResult(tokens, np.full(len(tokens), -0.5, np.float32), ids, -ids.astype(np.float32) - 0.5)


def check_batch(batch: Batch, page_size: int, bucket: Bucket | None) -> None:
    """Every promise of `Batch`. Raises AssertionError that names the row and the numbers."""
    real, rows = int(batch.starts[-1]), int(np.count_nonzero(batch.lengths))
    counts = np.diff(batch.starts)
    assert (counts[:rows] > 0).all() and not counts[rows:].any(), f"row sizes {counts.tolist()}"
    assert (batch.rows[:real] == np.repeat(np.arange(rows), counts[:rows])).all(), "tokens of a row are not together"
    singles = counts[:rows] == 1
    assert (singles[:-1] >= singles[1:]).all(), "a row of one token follows a longer one"
    seqs, times = np.unique(batch.seqs[:rows], return_counts=True)
    assert not (np.isin(batch.seqs[:rows], seqs[times > 1]) & singles).any(), (
        f"sequence slots {batch.seqs.tolist()} repeat in rows without drafts")
    assert (batch.seqs[:rows] > 0).all(), "a real row has sequence slot 0"
    ends = batch.positions[batch.starts[1:rows + 1] - 1] + 1
    assert (ends == batch.lengths[:rows]).all(), "a row's length is not its last position + 1"
    slots, positions = batch.slots[:real], batch.positions[:real]
    pages = batch.pages[batch.rows[:real], positions // page_size]
    assert (slots == pages * page_size + positions % page_size).all(), "a slot is not its position's"
    assert (pages > 0).all(), "a real token is written to page 0"
    assert len(np.unique(slots)) == real, "two tokens are written to one slot"
    assert not batch.slots[real:].any(), "a padding token is written outside slot 0"
    used = -(-batch.lengths // page_size)
    beyond = np.arange(batch.pages.shape[1]) >= used[:, None]
    assert ((batch.pages > 0) | beyond).all(), "the page table is shorter than a row's length"
    assert not (batch.pages * beyond).any(), "the page table is longer than a row's length"
    if batch.adapters is not None:
        owners = batch.adapters[batch.starts[:rows]]
        assert len(batch.adapters) == len(batch.tokens) and owners.any(), "adapters are named though no row has one"
        assert (batch.adapters[:real] == owners[batch.rows[:real]]).all(), "tokens of one row have different adapters"
        assert (batch.adapters >= 0).all() and not batch.adapters[real:].any(), "a padding token has an adapter"
    wanted = batch.targets != -2
    assert (batch.logit_rows[wanted] < real).all(), "logits of a padding token are wanted"
    if bucket is not None:
        sizes = (len(batch.tokens), len(batch.seqs), batch.pages.shape[1], len(batch.targets))
        assert sizes == (bucket.tokens, bucket.rows, bucket.pages, bucket.logits), f"{sizes} in {bucket}"

