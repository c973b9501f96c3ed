"""Whether a quantized checkpoint was made for activations in 8 bits: what its author measured, and so what a platform
with such products computes unless it is told otherwise. Scales of activations in the file are not read: a platform
takes each token's own.

Sources: compressed-tensors (`input_activations`); the fp8 and FBGEMM configurations of transformers; the exports of
NVIDIA ModelOpt and AMD Quark.
"""
from __future__ import annotations

from typing import Any

BITS = 8
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


def _compressed(config: dict[str, Any]) -> bool:
    """Every group of weights in 8 bits has inputs in 8 bits."""
    groups = [_table(group) for group in _table(config.get("config_groups")).values()]
    eight = [group for group in groups if _table(group.get("weights")).get("num_bits") == BITS]
    return bool(eight) and all(_table(group.get("input_activations")).get("num_bits") == BITS for group in eight)


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
