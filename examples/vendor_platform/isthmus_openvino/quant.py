"""Weights: float32 arrays, constants of a graph. Every format is expanded, none is kept."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from isthmus.core.platform import RawTensor, WeightSpec
from isthmus.platforms.expand import expand
from isthmus.platforms.experts import by_expert


def load_weight(raws: Sequence[RawTensor], spec: WeightSpec) -> np.ndarray:
    """Parts stacked along the output axis: [out, in], a vector, or [experts, out, in]. A copy."""
    if spec.role == "experts":
        return np.stack([np.concatenate([expand(raw) for raw in parts]) for parts in by_expert(raws, spec)])
    return np.concatenate([expand(raw) for raw in raws])
