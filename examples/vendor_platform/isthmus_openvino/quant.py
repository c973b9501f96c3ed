"""Weights: float32 values that become constants of a graph."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from isthmus.core.platform import RawTensor, WeightSpec
from isthmus.platforms.expand import expand
from isthmus.platforms.experts import by_expert
from openvino import opset15 as opset

from .graph import Tensor

KEPT: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dense:
    """A vector, [out, in], or [experts, out, in]."""

    values: np.ndarray

    def tensor(self) -> Tensor:
        return Tensor(opset.constant(self.values, shared_memory=True))

    def __str__(self) -> str:
        return "f32"


Leaf = Experts = Dense


def load_weight(raws: Sequence[RawTensor], spec: WeightSpec) -> Leaf:
    """Parts stacked along the output axis, experts along a first axis."""
    if spec.role == "experts":
        return Dense(np.stack([np.concatenate([expand(raw) for raw in parts]) for parts in by_expert(raws, spec)]))
    return Dense(np.concatenate([expand(raw) for raw in raws]))
