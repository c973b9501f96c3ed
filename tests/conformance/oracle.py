"""What is right for a tiny model: logits of one whole prefill on the reference platform in float64."""
from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..core.discovery import load_platform
from .case import Context, Wrong
from .compare import check_values
from .driver import Driver, Model
from .formats import rounding
from .tiny import VOCAB, tiny_model

# Largest normalised mean squared error of a whole model's logits.
LOGITS_NMSE = {"f64": 1e-20, "f32": 1e-9, "f16": rounding(5e-3, 11), "bf16": 5e-3}


def text(count: int, seed: int, name: str) -> list[int]:
    """Random tokens, none of them one that ends a text."""
    return random.Random(f"{seed} {name}").choices(range(3, VOCAB), k=count)


@functools.cache
def _reference(kind: str, seed: int) -> Model:
    platform = load_platform("reference")
    return Model(platform, platform.probe(), tiny_model(kind, seed), "f64", 16)


@functools.lru_cache(256)
def _logits(kind: str, seed: int, tokens: tuple[int, ...]) -> np.ndarray:
    pages = -(-len(tokens) // 16) + 1
    return Driver(_reference(kind, seed), pages=pages, seqs=2).logits((1, tokens))[0]


@functools.lru_cache(64)
def right_of(folder: Path, tokens: tuple[int, ...]) -> np.ndarray:
    """Of the model in a folder, [tokens, V] float64."""
    platform = load_platform("reference")
    model = Model(platform, platform.probe(), folder, "f64", 16)
    return Driver(model, pages=-(-len(tokens) // 16) + 1, seqs=2).logits((1, tokens))[0]


def right(context: Context, kind: str, tokens: Sequence[int]) -> np.ndarray:
    """[tokens, V] float64."""
    return _logits(kind, context.seed, tuple(int(token) for token in tokens))


def placed(context: Context, kind: str, dtype: str) -> Model:
    """The tiny model on the platform under test, placed once for all cases."""
    return context.once(("model", kind, dtype), lambda: Model(
        context.platform, context.manifest, tiny_model(kind, context.seed), dtype, context.page_size()))


def check_logits(got: np.ndarray, want: np.ndarray, dtype: str, what: str) -> None:
    """Against the reference's; that a tiny model says something is part of the check."""
    assert np.abs(want).max() > 1, "the model says nothing: a wrong answer would pass"
    check_values(got, want, LOGITS_NMSE[dtype], what)


def margin(want: np.ndarray, dtype: str) -> float:
    """How far apart two logits must be for a platform within tolerance to tell them apart: six times the root mean
    square error that the tolerance allows."""
    return 6 * float(np.sqrt(LOGITS_NMSE[dtype] * np.square(want).mean()))


def check_greedy(context: Context, kind: str, prompt: Sequence[int], output: Sequence[int], dtype: str,
                 what: str) -> None:
    """Every output token is the reference's best after what came before, ties within the logits' error excepted."""
    output = [int(token) for token in output]
    if any(not 0 <= token < VOCAB for token in output):
        raise Wrong(f"{what}: tokens {output} are outside the vocabulary of {VOCAB}")
    if not output:
        return
    want = right(context, kind, [*prompt, *output])[len(prompt) - 1:-1]
    short = want.max(axis=1) - want[np.arange(len(output)), output]
    bad = np.flatnonzero(short > margin(want, dtype))
    if len(bad):
        at = int(bad[0])
        raise Wrong(f"{what}: output token {at} is {output[at]}, whose logit is {short[at]:.3g} below that of "
                    f"{int(want[at].argmax())}, and rounding explains {margin(want, dtype):.1g} at most"
                    + (": is the token of the step before kept in the State under the row's sequence slot, and looked "
                       "up there for an input of -1?" if at else ""), index=(at,))
