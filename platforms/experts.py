"""The weights of a sparse layer expert by expert, whichever way a checkpoint keeps them."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core.platform import RawTensor, WeightSpec


def by_expert(raws: Sequence[RawTensor], spec: WeightSpec) -> list[list[RawTensor]]:
    """The parts [out, in] of each expert, in order, as views: what is stacked along the output axis for one expert.

    raws: as `WeightSpec.names` says, [experts, out, in] for each part, or two axes expert by expert. Raises
    `ValueError` where those do not give `spec.experts` experts.
    """
    stacked = [len(raw.shape) == 3 for raw in raws]
    if raws and all(stacked):
        counts = {raw.shape[0] for raw in raws}
        experts = spec.experts or max(counts)
        if counts == {experts}:
            return [[_slice(raw, number) for raw in raws] for number in range(experts)]
    elif not any(stacked) and spec.experts and raws and len(raws) % spec.experts == 0:
        width = len(raws) // spec.experts
        return [list(raws[start:start + width]) for start in range(0, len(raws), width)]
    raise ValueError(f"{', '.join(spec.names[:4])}: {len(raws)} tensors of {sorted({r.shape for r in raws})} are "
                     f"no parts of {spec.experts} experts")


def _slice(raw: RawTensor, number: int) -> RawTensor:
    """One of the first axis, and of what lies beside."""
    data = np.frombuffer(raw.data, np.uint8).reshape(raw.shape[0], -1)
    return RawTensor(raw.dtype, raw.shape[1:], data[number], tuple(_slice(extra, number) for extra in raw.extra))
