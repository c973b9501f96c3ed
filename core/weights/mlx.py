"""Quantized tensors of MLX checkpoints: which affine format each one has, checked against its shapes.

Source: `mlx_lm` (`quantize_model`, `save_config`): config.json holds "quantization" with group_size, bits, mode and, by
module, exceptions; a quantized `name.weight` is uint32 words with `name.scales` and `name.biases` beside it.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ..quant.formats import FORMATS

Described = tuple[str, tuple[int, ...]]
BESIDE = FORMATS["affine4_32"].beside
_WORD = 32


def affine_tensors(where: str, quantization: Any, tensors: Mapping[str, Described]) -> dict[str, Described]:
    """Format and logical shape of each quantized module, by its name without ".weight".

    quantization: the configuration's value.  tensors: stored format and shape of every tensor by name.
    Raises `CheckpointError` for a mode, bits or group size that is not read, and for shapes that do not agree.
    """
    if not isinstance(quantization, Mapping):
        raise CheckpointError(f"{where}: quantization must be a mapping, not {str(quantization)[:60]!r}")
    found = {}
    for name in tensors:
        stem, _, end = name.rpartition(".")
        if end == BESIDE[0]:
            own = quantization.get(stem)
            found[stem] = _checked(f"{where}: {stem}", own if isinstance(own, Mapping) else quantization, stem, tensors)
    return found


def _checked(where: str, settings: Mapping[str, Any], stem: str, tensors: Mapping[str, Described]) -> Described:
    mode, bits, group = (str(settings.get(key))[:20] for key in ("mode", "bits", "group_size"))
    name = f"affine{bits}_{group}"
    if mode not in ("None", "affine") or name not in FORMATS:
        known = ", ".join(f for f in FORMATS if FORMATS[f].beside)
        raise CheckpointError(f"{where} is quantized with mode {mode}, bits {bits}, group_size {group}; supported: "
                              f"{known}: convert the model to one of those")
    parts = [tensors.get(f"{stem}.{end}") for end in ("weight", *BESIDE)]
    missing = [end for end, part in zip(("weight", *BESIDE), parts, strict=True) if part is None]
    if missing:
        raise CheckpointError(f"{where} has {BESIDE[0]}, but no {' and no '.join(missing)}: download the model again")
    (dtype, shape), *beside = parts
    bits, group = FORMATS[name].bits, FORMATS[name].block
    rows, words = shape[:-1], shape[-1] if shape else 0
    width = words * _WORD // bits
    groups = (*rows, width // group)
    whole = dtype == "u32" and words * _WORD == width * bits and width % group == 0 and len(shape) > 1
    if not whole or any(FORMATS[d].kind != "float" or d.startswith("f8") or s != groups for d, s in beside):
        shown = ", ".join(f"{end} {d} {list(s)}" for end, (d, s) in zip(("weight", *BESIDE), parts, strict=True))
        raise CheckpointError(f"{where} does not fit {bits} bits in groups of {group}: {shown}")
    return name, (*rows, width)
