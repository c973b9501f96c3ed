"""Pre-norm layers of attention and a gated feed-forward: Llama 2, 3 and 3.x, SmolLM2, Mistral, Mixtral, and all that
differ from them in their `Family` alone."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..platform import Batch, Ops, Tensor
from . import blocks, feed_forward
from .config import FULL, Family, ModelConfig
from .fields import Fields
from .rope import LOCAL

NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def all_full(fields: Fields, layers: int) -> tuple[str, ...]:
    return (FULL,) * layers


def all_sliding(fields: Fields, layers: int) -> tuple[str, ...]:
    """Mistral: every layer has the window, if there is one."""
    return (LOCAL if "sliding_window" in fields else FULL,) * layers


LLAMA = Family(all_full)
MISTRAL = Family(all_sliding, qkv_bias=False, o_bias=False)
MIXTRAL = Family(all_sliding, qkv_bias=False, o_bias=False, sparse=feed_forward.mixtral)


def layout(config: ModelConfig) -> blocks.Layout:
    """The weight tree of `hidden`, and of the head behind it."""
    return blocks.model_layout(config, [
        blocks.attention_layout(config, i) | feed_forward.layout(config, i)
        | blocks.norm_layout(i, config.hidden, NORMS) for i in range(config.layers)])


def hidden(config: ModelConfig, ops: Ops, weights: Mapping[str, Any], batch: Batch,
           seen: dict[int, Tensor] | None = None) -> Tensor:
    """All layers, over all tokens of the batch: [T, hidden], which the head's norm is still to come to. seen: filled
    with the inputs of the layers that are its keys."""
    x = ops.embed(batch.tokens, weights["embed"])
    for i, layer in enumerate(weights["layers"]):
        if seen is not None and i in seen:
            seen[i] = x
        q, k, v = blocks.qkv(ops, ops.rms_norm(x, layer["attn_norm"], config.eps), layer, config)
        x = x + blocks.attention(ops, q, k, v, layer, config, i)
        x = x + feed_forward.forward(ops, ops.rms_norm(x, layer["mlp_norm"], config.eps), layer, config, i)
    return x
