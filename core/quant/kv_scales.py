"""Scales of K and V in 8-bit floats, as calibrated checkpoints have them for each layer: values are what is kept times
them.

Names of tensors: compressed-tensors (`kv_cache_scheme`) and AutoFP8 name them at the attention, ModelOpt and Quark at
the projections. Where each head has a scale of its own, the largest serves all of them.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ..errors import CheckpointError

Scales = dict[int, tuple[float, float]]
# What follows "layers.N.self_attn." -> what it is a scale of.
NAMES = {"k_scale": "k", "v_scale": "v", "kv_scale": "kv", "attn.k_scale": "k", "attn.v_scale": "v",
         "k_proj.k_scale": "k", "v_proj.v_scale": "v", "k_proj.output_scale": "k", "v_proj.output_scale": "v"}


def kv_scales(where: str, tensors: Iterable[str], numbers: Callable[[str], np.ndarray]) -> Scales:
    """Layer -> scale of K, scale of V; 1 for the one that is not given.

    tensors: all names of the checkpoint. numbers: a tensor's values in float32, at least one. Raises `CheckpointError`
    for a scale that is no finite number above 0.
    """
    found: dict[int, dict[str, float]] = {}
    for name in tensors:
        stem, _, end = name.rpartition(".self_attn.")
        layer = stem.rpartition("layers.")[2]
        if end in NAMES and layer.isdecimal():
            values = numbers(name)
            if not ((values > 0) & (values < np.inf)).all():
                raise CheckpointError(f"{where}: {name} has {values.min():g}: a scale of K or V is a number above 0; "
                                      "download the model again")
            found.setdefault(int(layer), {}).update(dict.fromkeys(NAMES[end], float(values.max())))
    return {layer: (scales.get("k", 1.0), scales.get("v", 1.0)) for layer, scales in sorted(found.items())}
