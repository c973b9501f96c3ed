"""Angular frequencies of rotary embeddings, with the scaling rules that checkpoints ask for.

Reads both spellings of a Hugging Face configuration: `rope_theta` with `rope_scaling`, and `rope_parameters`, which may
hold one entry per layer type; and `rope_freq_factors`, the divisors that a GGUF file stores as a tensor.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .fields import Fields

LOCAL = "sliding_attention"
_KEYS_BESIDE = ("partial_rotary_factor", "original_max_position_embeddings")


def rope_inv_freq(config: Mapping[str, Any], layer_type: str | None = None,
                  partial: bool = False) -> tuple[np.ndarray, float]:
    """Frequencies in radians per position, float64 [rotated / 2], and the factor on cosine and sine.

    All of a head rotates; its first head_dim * `partial_rotary_factor` elements where the type knows that (`partial`).
    `layer_type` ("full_attention", "sliding_attention") picks the entry where a model has several. Raises
    `CheckpointError` for an unknown rope_type or a parameter out of range. Source: Su et al. 2021 (RoFormer).
    """
    whole = Fields(config)
    head_dim = whole.integer("head_dim", 0, low=0) or \
        whole.integer("hidden_size") // whole.integer("num_attention_heads")
    if head_dim < 2 or head_dim % 2:
        raise CheckpointError(f"config: head_dim = {head_dim} is not supported; rotary embedding needs an even number")
    params = rope_parameters(config, layer_type)
    share = params.number("partial_rotary_factor", 1.0, high=1.0)
    rotated = int(head_dim * share)
    if share != 1.0 and (not partial or rotated < 2 or rotated % 2):
        raise params.error("partial_rotary_factor", share, "1" + " or leave an even part of "
                           f"head_dim = {head_dim}" * partial)
    base = params.number("rope_theta", 10000.0, low=1.0)
    inv_freq = base ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    rule = RULES[rope_type(params)]
    inv_freq, factor = rule(inv_freq, params, whole)
    if "rope_freq_factors" in whole and layer_type != LOCAL:
        inv_freq = inv_freq / np.array(whole.numbers("rope_freq_factors", rotated // 2))
    return inv_freq, factor


def rope_parameters(config: Mapping[str, Any], layer_type: str | None = None) -> Fields:
    """The rotary parameters of one layer type as one flat mapping, whichever way the configuration spells them."""
    whole = Fields(config)
    params = Fields(whole.get("rope_parameters", {}), "rope_parameters").values
    nested = any(isinstance(v, Mapping) for v in params.values())
    if nested:
        if not isinstance(params.get(layer_type), Mapping):
            raise CheckpointError(f"rope_parameters lacks {layer_type!r}, it has {', '.join(map(str, params))}")
        params = params[layer_type]
    elif not params:
        params = Fields(whole.get("rope_scaling", {}), "rope_scaling").values
    local = layer_type == LOCAL and "rope_local_base_freq" in whole
    if local and not nested:
        params = {}
    beside = {key: whole.get(key) for key in _KEYS_BESIDE if key in whole}
    theta = whole.get("rope_local_base_freq" if local else "rope_theta", None)
    given = {key: value for key, value in params.items() if value is not None}
    return Fields({"rope_theta": theta} | beside | given, "rope_parameters" if params else "config")


def rope_type(params: Fields) -> str:
    """The name of the scaling rule; written `rope_type`, in older files `type`."""
    key = "rope_type" if "rope_type" in params else "type"
    return params.choice(key, {name: name for name in RULES}, "default")


def trained_length(params: Fields, config: Fields) -> int:
    """Positions before scaling, for the rules that stretch from there."""
    return params.integer("original_max_position_embeddings", config.get("max_position_embeddings", None), low=2)


def static_limit(config: Mapping[str, Any], layer_type: str | None = None) -> int | None:
    """Positions up to which fixed frequencies are right, where a rule changes them with the length; else None."""
    params = rope_parameters(config, layer_type)
    return trained_length(params, Fields(config)) if rope_type(params) == "longrope" else None


def _default(inv_freq: np.ndarray, params: Fields, config: Fields) -> tuple[np.ndarray, float]:
    return inv_freq, 1.0


def _linear(inv_freq: np.ndarray, params: Fields, config: Fields) -> tuple[np.ndarray, float]:
    """Position interpolation (Chen et al. 2023)."""
    return inv_freq / params.number("factor"), 1.0


def _dynamic(inv_freq: np.ndarray, params: Fields, config: Fields) -> tuple[np.ndarray, float]:
    """Dynamic NTK: frequencies change only beyond max_position_embeddings, which is where a model's limit is."""
    params.number("factor")
    return inv_freq, 1.0


def _llama3(inv_freq: np.ndarray, params: Fields, config: Fields) -> tuple[np.ndarray, float]:
    """Llama 3.1: long waves are divided by the factor, short ones kept, those between blended by wavelength."""
    factor, low, high = (params.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise params.error("high_freq_factor", high, f"above low_freq_factor = {low:g}")
    turns = trained_length(params, config) * inv_freq / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inv_freq * (keep + (1 - keep) / factor), 1.0


def _yarn(inv_freq: np.ndarray, params: Fields, config: Fields) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al. 2023): as Llama 3.1, but blended by dimension; the returned factor sharpens attention."""
    half, trained = len(inv_freq), trained_length(params, config)
    factor = params.number("factor", config.get("max_position_embeddings", trained) / trained)
    log_base = math.log(params.number("rope_theta", 10000.0, low=1.0))

    def dimension(turns: float) -> float:
        return half * math.log(trained / (turns * 2 * math.pi)) / log_base

    low, high = dimension(params.number("beta_fast", 32)), dimension(params.number("beta_slow", 1))
    if params.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    stretch = np.clip((np.arange(half) - low) / (high - low or 0.001), 0.0, 1.0)
    mscale, mscale_all = params.get("mscale", 0), params.get("mscale_all_dim", 0)
    if mscale and mscale_all:
        sharpen = _yarn_scale(factor, params.number("mscale")) / _yarn_scale(factor, params.number("mscale_all_dim"))
    else:
        sharpen = _yarn_scale(factor, 1.0)
    return inv_freq * (stretch / factor + 1 - stretch), params.number("attention_factor", sharpen)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(inv_freq: np.ndarray, params: Fields, config: Fields) -> tuple[np.ndarray, float]:
    """LongRoPE (Ding et al. 2024) with its short factors: right up to the trained length, see `static_limit`."""
    trained = trained_length(params, config)
    stretch = params.number("factor", config.get("max_position_embeddings", trained) / trained)
    sharpen = math.sqrt(1 + math.log(stretch) / math.log(trained)) if stretch > 1 else 1.0
    factors = np.array(params.numbers("short_factor", len(inv_freq)))
    return inv_freq / factors, params.number("attention_factor", sharpen)


RULES: dict[str, Callable[[np.ndarray, Fields, Fields], tuple[np.ndarray, float]]] = {
    "default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn,
    "longrope": _longrope, "su": _longrope,
}
