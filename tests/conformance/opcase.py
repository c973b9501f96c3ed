"""Cases of the ops: what a platform must compute, in plain loops over float64, independent of any platform.

A case builds weights, a few steps and what each must give. Inputs reach the device as embedding tables whose row t is
token t's input, so that only the neck is used. All inputs are values that the compute dtype holds exactly.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.plan import Batch, Sampling, StepResult
from ..core.platform import LayerState, RawTensor, StateSpec, WeightSpec
from .case import random_source
from .formats import plain, rounded, rounding

PAGE = 16
DTYPES = ("f64", "f32", "f16", "bf16")
# Largest normalised mean squared error: f64 inputs pass through float32, f16 and bf16 round each op's result once or
# twice, of 11 and 8 bits.
NMSE = {"f64": 1e-12, "f32": 1e-10, "f16": rounding(1e-4, 11), "bf16": 1e-4}
QUANTIZED_NMSE = {"f64": 1e-12, "f32": 1e-8, "f16": rounding(1e-3, 11), "bf16": 1e-3}


Entry = tuple[list[RawTensor], WeightSpec] | tuple[list[RawTensor], WeightSpec, str]


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
    """Weights by name, each as parts, how to load them, and the dtype where it is not the case's; steps that share one
    state."""

    weights: dict[str, Entry]
    steps: list[Step]
    state: StateSpec
    pages: int


@dataclass(frozen=True)
class OpCase:
    """id: for people and ledgers. asks: what `Platform.supports(op, **asks)` is asked. nmse: tolerance of values.
    kv: dtype of K and V where it is another than is computed in.
    build(seed): the case with the inputs of that seed."""

    id: str
    op: str
    dtype: str
    build: Callable[[int], Run]
    asks: dict[str, Any] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    nmse: float = 0.0
    page_size: int | None = None
    kv: str = ""

    def __str__(self) -> str:
        return self.id


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> np.ndarray:
    return rounded(rng.normal(size=shape) * scale, dtype)


def weight(x: np.ndarray, role: str = "linear") -> Entry:
    return parts([plain(x)], role)


def parts(raws: list[RawTensor], role: str = "linear", experts: int = 0) -> Entry:
    return raws, WeightSpec(tuple(f"part{i}" for i in range(len(raws))), role, experts=experts)


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
    def build(seed: int) -> Run:
        weights, forward, batch, expected = make(random_source(seed, id))
        size = len(batch.seqs) + 1
        tokens = None if isinstance(expected, StepResult) else len(expected)
        return Run(weights, [Step(forward, batch, expected, tokens)], state(dtype, size), size)
    return OpCase(f"{op}[{id},{dtype}]", op, dtype, build, (asks or {}) | {"dtype": dtype},
                  nmse=NMSE[dtype] if nmse is None else nmse, **more)
