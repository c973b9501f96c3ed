"""What a drafter computes with, loaded beside the model that it drafts for.

The layers of a drafter keep K and V behind the model's own, in the same pages. What they need of every token is
computed inside the model's own steps, as the last part of the same forward: so a cached prefix, a chunk, a copied page
or a request that comes back has it as it has the model's, and nobody keeps account of what a drafter has seen. A draft
is made by short steps of the drafter's own on the same state.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError
from ..models.blocks import head
from ..models.config import ModelConfig
from ..models.loader import LoadedModel
from ..platform import Batch, Manifest, Ops, Tensor, Unsupported
from ..specs import LayerState
from .options import asked, options_of

Follow = Callable[[Ops, Any, Batch, Any], None]


class Loading(NamedTuple):
    """The model that a drafter is loaded beside, before its weights are read. config: whole; dtype: it computes in.
    resolve: name of a model -> its path.  tell: of (bytes done, bytes in all)."""

    checkpoint: Any
    config: ModelConfig
    platform: Any
    manifest: Manifest
    dtype: str
    page_size: int
    world: int
    strict: bool
    resolve: Callable[[str], Path]
    tell: Callable[[int, int], None]


class DraftSteps(NamedTuple):
    """A drafter's own step, to be compiled as a model's is: the tokens of the batch, and one drawn after each row.

    ids: the model's token for each that it draws, int64, where it has a vocabulary of its own; steps behind its first
    are fed such tokens, and compute with `after` instead of `weights`."""

    forward: Callable[[Ops, Any, Batch], Tensor]
    weights: Any
    after: Any = None
    ids: np.ndarray | None = None


class Companion:
    """What is to be loaded; this one is nothing. What can be refused is refused when it is made.

    nbytes: of its weights as stored.  layers: the caches of its layers.
    """

    nbytes: int = 0
    layers: tuple[LayerState, ...] = ()

    def joined(self, model: LoadedModel) -> LoadedModel:
        """The loaded model with it. Raises `CheckpointError` and `Unsupported` as the loader does."""
        return model


def companion(items: Iterable[str], loading: Loading) -> Companion:
    """That of the drafter that `--speculative` names. Raises `ConfigError`, `CheckpointError` or `Unsupported` with the
    way out."""
    setting = asked(items)
    if setting is None:
        return Companion()
    kind, options = options_of(setting)
    if not kind.on_device:
        return Companion()
    if loading.world > 1:
        raise Unsupported(f"--speculative {setting.drafter}: ranks of tensor parallelism know no other step than the "
                          "model's; ngram and suffix draft without one")
    made = kind.beside(loading, options)
    if not isinstance(made, Companion):
        raise ConfigError(f"--speculative {setting.drafter}: beside() gave {type(made).__name__}, not a Companion")
    return made


def join(model: LoadedModel, steps: DraftSteps, follow: Follow | None = None, weights: Any = None,
         layers: tuple[LayerState, ...] = (), nbytes: int = 0, report: Iterable[str] = (),
         taps: tuple[int, ...] = ()) -> LoadedModel:
    """A model with what drafts for it. follow: computed in each step from what the model's layers give, with its own
    leaves under "draft". taps: of which layers it gets the inputs instead."""
    model = replace(model, draft=steps, state_layers=model.state_layers + layers, nbytes=model.nbytes + nbytes,
                    report=[*model.report, *report])
    if follow is None:
        return model
    return replace(model, weights={**model.weights, "draft": weights},
                   forward=partial(_followed, model.hidden, model.rank, follow, taps))


def _followed(hidden: Callable[..., Tensor], config: ModelConfig, follow: Follow, taps: tuple[int, ...], ops: Ops,
              weights: Any, batch: Batch) -> Tensor:
    seen: dict[int, Any] = dict.fromkeys(taps)
    x = hidden(ops, weights, batch, seen)
    follow(ops, weights, batch, [seen[i] for i in taps] if taps else x)
    return head(ops, x, weights, batch.logit_rows, config)
