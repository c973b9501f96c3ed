"""Gemma 3 (text): scaled embeddings, norms before and after each part, norms on q and k, local and global layers."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..platform import Batch, Ops, Tensor
from . import blocks, feed_forward
from .config import FULL, Family, ModelConfig
from .fields import Fields
from .rope import LOCAL

NORMS = {"attn_norm": "input_layernorm", "attn_out_norm": "post_attention_layernorm",
         "mlp_norm": "pre_feedforward_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}


def one_in_six_full(fields: Fields, layers: int) -> tuple[str, ...]:
    """Every `sliding_window_pattern`-th layer sees everything, the others a window."""
    pattern = fields.integer("sliding_window_pattern", fields.get("_sliding_window_pattern", 6))
    return tuple(FULL if (i + 1) % pattern == 0 else LOCAL for i in range(layers))


# Checkpoints leave out what equals the defaults of Gemma3TextConfig.
GEMMA3 = Family(one_in_six_full, {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "tie_word_embeddings": True,
}, qk_norm=True, scaled_embedding=True, norms_add_one=True)


def layout(config: ModelConfig) -> blocks.Layout:
    """The weight tree of `hidden`, and of the head behind it."""
    return blocks.model_layout(config, [
        blocks.attention_layout(config, i) | feed_forward.layout(config, i)
        | blocks.norm_layout(i, config.hidden, NORMS) for i in range(config.layers)])


def hidden(config: ModelConfig, ops: Ops, weights: Mapping[str, Any], batch: Batch,
           seen: dict[int, Tensor] | None = None) -> Tensor:
    """All layers, over all tokens of the batch: [T, hidden], which the head's norm is still to come to. seen: filled
    with the inputs of the layers that are its keys."""
    x = ops.embed(batch.tokens, weights["embed"]) * config.embed_scale
    for i, layer in enumerate(weights["layers"]):
        if seen is not None and i in seen:
            seen[i] = x
        q, k, v = blocks.qkv(ops, ops.rms_norm(x, layer["attn_norm"], config.eps), layer, config)
        y = blocks.attention(ops, q, k, v, layer, config, i)
        x = x + ops.rms_norm(y, layer["attn_out_norm"], config.eps)
        y = feed_forward.forward(ops, ops.rms_norm(x, layer["mlp_norm"], config.eps), layer, config, i)
        x = x + ops.rms_norm(y, layer["mlp_out_norm"], config.eps)
    return x
