"""Quantized tensors of MLX checkpoints: which affine format each one has, checked against its shapes.

Source: `mlx_lm` (`quantize_model`, `save_config`): config.json holds "quantization" with group_size, bits, mode and, by
module, exceptions; a quantized `name.weight` is uint32 words with `name.scales` and `name.biases` beside it.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError, shown
from ..quant.formats import FORMATS
from ..quant.schemes import Described, Part, Quantized

BESIDE = FORMATS["affine4_32"].beside
REMEDY = "correct config.json, or convert the model again"
_ENDS = tuple(f".{end}" for end in BESIDE)
_WORD = 32


def affine_tensors(where: str, quantization: Any,
                   tensors: Mapping[str, Described]) -> tuple[dict[str, Quantized], set[str]]:
    """The quantized matrices by their names, and the names of all tensors that are parts of them.

    quantization: the configuration's value.  tensors: stored format and shape of every tensor by name.
    Raises `CheckpointError` for a mode, bits or group size that is not read, also of a module that is not there, for
    what is no setting of a module, and for shapes that do not agree.
    """
    if not isinstance(quantization, Mapping):
        raise CheckpointError(f"{where}: quantization must be a mapping with bits and group_size, not "
                              f"{shown(quantization)}: {REMEDY}")
    packed = {name.rpartition(".")[0]: None for name, (dtype, _) in tensors.items()
              if name.endswith(_ENDS) or dtype == "u32" and name.endswith(".weight")}
    for key, own in quantization.items():
        if "." not in key and f"{key}.weight" not in tensors and key not in packed:
            continue  # no module
        if isinstance(own, Mapping):
            _format(f"{where}: {key}", own)
        elif not isinstance(own, bool) or key in packed and not own:
            said = "false, and its tensors are quantized" if own is False else shown(own)
            raise CheckpointError(f"{where}: quantization of {key} is {said}; a mapping with bits and group_size is "
                                  f"needed, or false where nothing is quantized: {REMEDY}")
    found, used = {}, set()
    for stem in packed:
        own = quantization.get(stem)
        matrix = _checked(f"{where}: {stem}", own if isinstance(own, Mapping) else quantization, stem, tensors)
        found[matrix.codes] = matrix
        used |= {matrix.codes, *(part.name for part in matrix.beside)}
    return found, used


def _format(where: str, settings: Mapping[str, Any]) -> str:
    mode, bits, group = (str(settings.get(key))[:20] for key in ("mode", "bits", "group_size"))
    name = f"affine{bits}_{group}"
    if mode not in ("None", "affine") or name not in FORMATS:
        known = ", ".join(f for f in FORMATS if f.startswith("affine"))
        raise CheckpointError(f"{where} is quantized with mode {mode}, bits {bits}, group_size {group}; supported: "
                              f"{known}: convert the model to one of those")
    return name


def _checked(where: str, settings: Mapping[str, Any], stem: str, tensors: Mapping[str, Described]) -> Quantized:
    name = _format(where, settings)
    parts = [tensors.get(f"{stem}.{end}") for end in ("weight", *BESIDE)]
    missing = [end for end, part in zip(("weight", *BESIDE), parts, strict=True) if part is None]
    if missing:
        raise CheckpointError(f"{where} is quantized, but has no {' and no '.join(missing)}: download the model again")
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
