"""Qwen2 and 2.5 (Llama with biases on q, k and v), Qwen3 (Llama with norms on each head of q and k), and their sparse
relatives Qwen2-MoE and Qwen3-MoE."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..platform import Batch, Ops, Tensor
from . import blocks, feed_forward, llama
from .config import FULL, Family, ModelConfig
from .fields import Fields
from .rope import LOCAL

QK_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}


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


def layout(config: ModelConfig) -> blocks.Layout:
    """The weight tree of Qwen3; Qwen2 has Llama's."""
    tree = llama.layout(config)
    for i, layer in enumerate(tree["layers"]):
        layer.update(blocks.norm_layout(i, config.head_dim, QK_NORMS))
    return tree


def forward(config: ModelConfig, ops: Ops, weights: Mapping[str, Any], batch: Batch) -> Tensor:
    """One step of Qwen3 over all tokens of the batch."""
    x = ops.embed(batch.tokens, weights["embed"])
    for i, layer in enumerate(weights["layers"]):
        q, k, v = blocks.qkv(ops, ops.rms_norm(x, layer["attn_norm"], config.eps), layer, config)
        q, k = ops.rms_norm(q, layer["q_norm"], config.eps), ops.rms_norm(k, layer["k_norm"], config.eps)
        x = x + blocks.attention(ops, q, k, v, layer, config, i)
        x = x + feed_forward.forward(ops, ops.rms_norm(x, layer["mlp_norm"], config.eps), layer, config, i)
    return blocks.head(ops, x, weights, batch.logit_rows, config)
