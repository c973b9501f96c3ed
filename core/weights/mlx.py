"""Quantized tensors of MLX checkpoints: which affine format each one has, checked against its shapes.

Source: `mlx_lm` (`quantize_model`, `save_config`): config.json holds "quantization" with group_size, bits, mode and, by
module, exceptions; a quantized `name.weight` is uint32 words with `name.scales` and `name.biases` beside it.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ..quant.formats import FORMATS
from ..quant.schemes import Described, Part, Quantized

BESIDE = FORMATS["affine4_32"].beside
_WORD = 32


def affine_tensors(where: str, quantization: Any,
                   tensors: Mapping[str, Described]) -> tuple[dict[str, Quantized], set[str]]:
    """The quantized matrices by their names, and the names of all tensors that are parts of them.

    quantization: the configuration's value.  tensors: stored format and shape of every tensor by name.
    Raises `CheckpointError` for a mode, bits or group size that is not read, and for shapes that do not agree.
    """
    if not isinstance(quantization, Mapping):
        raise CheckpointError(f"{where}: quantization must be a mapping, not {str(quantization)[:60]!r}")
    found, used = {}, set()
    for name in tensors:
        stem, _, end = name.rpartition(".")
        if end == BESIDE[0]:
            own = quantization.get(stem)
            matrix = _checked(f"{where}: {stem}", own if isinstance(own, Mapping) else quantization, stem, tensors)
            found[matrix.codes] = matrix
            used |= {matrix.codes, *(part.name for part in matrix.beside)}
    return found, used


def _checked(where: str, settings: Mapping[str, Any], stem: str, tensors: Mapping[str, Described]) -> Quantized:
    mode, bits, group = (str(settings.get(key))[:20] for key in ("mode", "bits", "group_size"))
    name = f"affine{bits}_{group}"
    if mode not in ("None", "affine") or name not in FORMATS:
        known = ", ".join(f for f in FORMATS if f.startswith("affine"))
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
    return Quantized(f"{stem}.weight", name, (*rows, width),
                     tuple(Part(f"{stem}.{end}", *part) for end, part in zip(BESIDE, beside, strict=True)))
