"""Scales of K and V in 8-bit floats, as calibrated checkpoints have them for each layer: values are what is kept times
them.

Names of tensors: compressed-tensors (`kv_cache_scheme`) and AutoFP8 name them at the attention, ModelOpt and Quark at
the projections. Where each head has a scale of its own, the largest serves all of them.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ..errors import CheckpointError, shown

Scales = dict[int, tuple[float, float]]
# What follows "layers.N.self_attn." -> what it is a scale of.
NAMES = {"k_scale": "k", "v_scale": "v", "kv_scale": "kv", "attn.k_scale": "k", "attn.v_scale": "v",
         "k_proj.k_scale": "k", "v_proj.v_scale": "v", "k_proj.output_scale": "k", "v_proj.output_scale": "v"}
# Beyond these the values times the scale, and its inverse times them, leave what f32 and bf16 activations can hold
# with room for sums: no calibration gives such a one, a damaged file does.
LEAST, MOST = 2.0 ** -40, 2.0 ** 40
READ = "8-bit floats with one scale for a layer or for each head, not dynamic"


def kv_scales(where: str, tensors: Iterable[str], numbers: Callable[[str], np.ndarray], heads: int | None) -> Scales:
    """Layer -> scale of K, scale of V.

    tensors: all names of the checkpoint. numbers: a tensor's values in float32, at least one. heads: of K and V, None
    where the configuration does not say. Raises `CheckpointError` for a scale of K without one of V or the reverse, for
    other than one number or one for each head, numbers out of `LEAST` to `MOST`, and names that disagree.
    """
    found: dict[int, dict[str, tuple[str, float]]] = {}
    for name in tensors:
        stem, _, end = name.rpartition(".self_attn.")
        layer = stem.rpartition("layers.")[2]
        if end not in NAMES or not layer.isdecimal():
            continue
        value = _value(where, name, numbers(name), heads)
        for part in NAMES[end]:
            other, before = found.setdefault(int(layer), {}).setdefault(part, (name, value))
            if before != value:
                raise CheckpointError(f"{where}: {other} is {before:g}, but {name} is {value:g}: both are the scale of "
                                      f"{part.upper()} in layer {layer}; download the model again")
    for scales in found.values():
        for part, lacking in ("kv", "vk"):
            if lacking not in scales:
                raise CheckpointError(f"{where}: {scales[part][0]} has no scale of {lacking.upper()} beside it: layers "
                                      "have both or neither; download the model again")
    return {layer: (scales["k"][1], scales["v"][1]) for layer, scales in sorted(found.items())}


def _value(where: str, name: str, values: np.ndarray, heads: int | None) -> float:
    if values.size != 1 and heads is not None and values.size != heads:
        raise CheckpointError(f"{where}: {name} has {values.size} numbers; a scale of K or V is one number, or one for "
                              f"each of the {heads} heads of K and V")
    bad = values[~((values >= LEAST) & (values <= MOST))]
    if bad.size:
        raise CheckpointError(f"{where}: {name} has {bad[0]:g}: a scale of K or V is a number above 0, from 2**-40 to "
                              "2**40; download the model again")
    return float(values.max())


def heads_of(config: Mapping[str, Any]) -> int | None:
    """How many heads K and V have; None where the configuration does not say it with a number."""
    inner = config.get("text_config")
    words = {**config, **(inner if isinstance(inner, Mapping) else {})}
    count = words.get("num_key_value_heads") or words.get("num_attention_heads")
    return count if isinstance(count, int) and not isinstance(count, bool) else None


def unread_scheme(scheme: Any) -> str:
    """What to tell of a `kv_cache_scheme` that means other scales than are read here; "" for none, or one that is."""
    known = isinstance(scheme, Mapping) and not scheme.get("dynamic") and (
        scheme.get("num_bits") in (None, 8) and scheme.get("type", "float") == "float"
        and scheme.get("strategy") in (None, "tensor", "attn_head"))
    if scheme is None or known:
        return ""
    return f"kv_cache_scheme {shown(scheme)} is left alone: only {READ}, are used"
