"""Qwen2 and 2.5 (Llama with biases on q, k and v), Qwen3 (Llama with norms on each head of q and k), and their sparse
relatives Qwen2-MoE and Qwen3-MoE."""
from __future__ import annotations

from . import feed_forward, llama
from .config import FULL, Family
from .fields import Fields
from .rope import LOCAL


def upper_sliding(fields: Fields, layers: int) -> tuple[str, ...]:
    """Layers from `max_window_layers` on have the window, if `use_sliding_window` says so."""
    if not fields.flag("use_sliding_window", False) or "sliding_window" not in fields:
        return (FULL,) * layers
    first = fields.integer("max_window_layers", 28, low=0)
    return tuple(LOCAL if i >= first else FULL for i in range(layers))


def every_second_sliding(fields: Fields, layers: int) -> tuple[str, ...]:
    """Qwen2-MoE: of the layers below `max_window_layers` the first, third ... have the window, if it is used."""
    if not fields.flag("use_sliding_window", False) or "sliding_window" not in fields:
        return (FULL,) * layers
    stop = fields.integer("max_window_layers", 28, low=0)
    return tuple(LOCAL if i % 2 == 0 and i < stop else FULL for i in range(layers))


def all_sliding_if_used(fields: Fields, layers: int) -> tuple[str, ...]:
    """Qwen3-MoE: every layer has the window, if it is used."""
    return llama.all_sliding(fields, layers) if fields.flag("use_sliding_window", False) else (FULL,) * layers


QWEN2 = Family(upper_sliding, qkv_bias=True, o_bias=False)
QWEN3 = Family(upper_sliding, {"head_dim": 128}, qk_norm=True)
QWEN2_MOE = Family(every_second_sliding, qkv_bias=True, o_bias=False, sparse=feed_forward.qwen(shared=True))
QWEN3_MOE = Family(all_sliding_if_used, qk_norm=True, sparse=feed_forward.qwen(shared=False))
