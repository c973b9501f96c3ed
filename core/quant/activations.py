"""Whether a quantized checkpoint was made for activations in 8 bits: what its author measured, and so what a platform
with such products computes unless it is told otherwise; and the scales of activations that were calibrated for it.

Sources: compressed-tensors (`input_activations`); the fp8 and FBGEMM configurations of transformers; the exports of
NVIDIA ModelOpt and AMD Quark.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from ..errors import CheckpointError

BITS = 8
FORMATS = ("fp8", "int8")  # of weights, whose products take one scale for all of an activation
# Beyond these a calibrated scale comes from a damaged file: products in f32 and bf16 have no room for it.
LEAST, MOST = 2.0 ** -40, 2.0 ** 40
_QUARK = ("fp8_e4m3", "int8")


def declared(config: Any) -> bool:
    """config: the value of `quantization_config`, that `schemes.quantized` has read without an error."""
    method = config.get("quant_method")
    if method == "fp8":
        return config.get("activation_scheme", "dynamic") in ("dynamic", "static")
    if method == "modelopt":
        return str(config.get("quant_algo")).startswith("FP8")
    if method == "quark":
        return _table(_table(config.get("global_quant_config")).get("input_tensors")).get("dtype") in _QUARK
    if method in (None, "compressed-tensors"):
        return _compressed(config)
    return method == "fbgemm_fp8"


def calibrated(config: Any) -> bool:
    """Whether those activations have one scale for all tokens, which the file holds; the same `config`."""
    if not declared(config):
        return False
    method = config.get("quant_method")
    if method == "fp8":
        return config.get("activation_scheme") == "static"
    if method == "modelopt":
        return config.get("quant_algo") == "FP8"
    if method == "quark":
        return _table(_table(config.get("global_quant_config")).get("input_tensors")).get("is_dynamic") is False
    return any(group.get("dynamic") is False and group.get("strategy", "tensor") == "tensor"
               for group in _inputs(config))


def input_scales(where: str, matrices: Mapping[str, str], tensors: Collection[str],
                 numbers: Callable[[str], np.ndarray], data: Callable[[str], np.ndarray]) -> dict[str, float]:
    """Name of a weight -> the scale of what it is multiplied with: values are codes times it.

    matrices: format of each quantized weight, by its name ("....weight"). tensors: all names of the checkpoint.
    numbers: a tensor's values in float32, at least one; the largest serves all. data: its bytes. Left out are a zero,
    of an expert that calibration never met, and what has a zero point, being no multiple of its codes. Raises
    `CheckpointError` for other numbers out of `LEAST` to `MOST`.
    """
    found = {}
    for name, kind in matrices.items():
        stem = name.removesuffix(".weight")
        scale, zero = f"{stem}.input_scale", f"{stem}.input_zero_point"
        if kind not in FORMATS or scale not in tensors or (zero in tensors and data(zero).any()):
            continue
        value = float(numbers(scale).max())
        if value and not LEAST <= value <= MOST:
            raise CheckpointError(f"{where}: {scale} has {value:g}: a scale of activations is a number above 0, from "
                                  "2**-40 to 2**40; download the model again")
        if value:
            found[name] = value
    return found


def _compressed(config: dict[str, Any]) -> bool:
    """Every group of weights in 8 bits has inputs in 8 bits."""
    inputs = _inputs(config)
    return bool(inputs) and all(group.get("num_bits") == BITS for group in inputs)


def _inputs(config: dict[str, Any]) -> list[dict[str, Any]]:
    """What is said of the inputs of each group of weights in 8 bits."""
    groups = [_table(group) for group in _table(config.get("config_groups")).values()]
    return [_table(group.get("input_activations")) for group in groups
            if _table(group.get("weights")).get("num_bits") == BITS]


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
