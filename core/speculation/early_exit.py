"""Drafts by the model's own first layers, with its own norm and head behind them: no further weights, K or V.

Source: Elhoushi et al. 2024, LayerSkip. Models that were not trained for it are seldom right so early.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..models.blocks import head
from ..models.loader import LoadedModel
from ..platform import Batch, Ops, Tensor
from .companion import Companion, DraftSteps, Loading, join
from .contract import DRAFTERS, Option
from .on_device import ModelDrafter


class EarlyExitDrafter(ModelDrafter):
    """A draft step writes K and V of its layers where the model's step will: the same for a token that stays."""

    options = {"layers": Option(0, 0, 4096, "of the model's layers, from the first on; 0 = a third of them")}

    @classmethod
    def beside(cls, loading: Loading, options: Mapping[str, Any]) -> Companion:
        return FirstLayers(loading.config.layers, options["layers"])


class FirstLayers(Companion):
    """So many of the model's layers."""

    def __init__(self, all_layers: int, count: int):
        self._count = count or max(1, all_layers // 3)
        if self._count >= all_layers:
            raise ConfigError(f"--speculative layers={self._count}: the model has {all_layers} layers, and fewer of "
                              "them must draft")

    def joined(self, model: LoadedModel) -> LoadedModel:
        def forward(ops: Ops, weights: Any, batch: Batch) -> Tensor:
            return head(ops, model.hidden(ops, weights, batch), weights, batch.logit_rows, model.rank)
        weights = {**model.weights, "layers": model.weights["layers"][:self._count]}
        return join(model, DraftSteps(forward, weights),
                    report=[f"drafts come from the first {self._count} of {model.config.layers} layers"])


DRAFTERS.register("exit", EarlyExitDrafter)
