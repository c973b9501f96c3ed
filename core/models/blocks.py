"""Parts that the model definitions share: pure functions over `Ops`, and the layout of the weights they use.

A layout is a nested mapping of the weight tree's own shape whose leaves are `Stack`s: what to load, and of which shape.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..platform import Ops, Tensor, Weight
from ..specs import Role, WeightSpec
from .config import ModelConfig

Layer = Mapping[str, Any]
Layout = dict[str, Any]


class Stack(NamedTuple):
    """One entry of the weight tree: tensors of the checkpoint, stacked along the output axis.

    shapes: expected shape of each of `spec.names`. joint: True = one leaf; False = a tuple with one leaf for each run
    of neighbours in the same format, so that parts of different formats keep their own.
    """

    spec: WeightSpec
    shapes: tuple[tuple[int, ...], ...]
    joint: bool = True


def single(name: str, role: Role, shape: tuple[int, ...], cut: int | None = None) -> Stack:
    """An entry of one tensor."""
    return Stack(WeightSpec((name,), role, cut), (shape,))


def linear_layout(key: str, prefix: str, parts: Sequence[str], widths: Sequence[int], width_in: int, cut: int,
                  bias: bool) -> Layout:
    """`key` (and `key_bias`) for projections `prefix + part` of [widths[i], width_in] that `stacked_linear` applies."""
    names = [prefix + part for part in parts]
    weights = WeightSpec(tuple(f"{n}.weight" for n in names), "linear", cut)
    layout = {key: Stack(weights, tuple((w, width_in) for w in widths), joint=False)}
    if bias:
        biases = WeightSpec(tuple(f"{n}.bias" for n in names), "bias", cut)
        layout[key + "_bias"] = Stack(biases, tuple((w,) for w in widths), joint=False)
    return layout


def layer_layout(config: ModelConfig, index: int) -> Layout:
    """The attention and gated feed-forward that all dense families have, without their norms."""
    attn, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
    inner, wide = config.heads * config.head_dim, config.intermediate
    heads = ("q_proj", "k_proj", "v_proj")
    return {
        **linear_layout("qkv", attn, heads, config.qkv_widths, config.hidden, 0, config.qkv_bias),
        **linear_layout("o", attn, ("o_proj",), (config.hidden,), inner, 1, config.o_bias),
        **linear_layout("gate_up", mlp, ("gate_proj", "up_proj"), (wide, wide), config.hidden, 0, config.mlp_bias),
        **linear_layout("down", mlp, ("down_proj",), (config.hidden,), wide, 1, config.mlp_bias),
    }


def norm_layout(index: int, width: int, names: Mapping[str, str]) -> Layout:
    """Norms of one layer: key in the tree -> name in the checkpoint."""
    return {key: single(f"model.layers.{index}.{name}.weight", "norm", (width,)) for key, name in names.items()}


def model_layout(config: ModelConfig, layers: list[Layout]) -> Layout:
    """The whole tree around `layers`; a tied model has no `head` here, the loader puts the embedding's leaf there."""
    matrix = (config.vocab_size, config.hidden)
    layout = {"embed": single("model.embed_tokens.weight", "embed", matrix), "layers": layers,
              "norm": single("model.norm.weight", "norm", (config.hidden,))}
    return layout if config.tied else layout | {"head": single("lm_head.weight", "linear", matrix)}


def stacked_linear(ops: Ops, x: Tensor, layer: Layer, key: str, widths: Sequence[int]) -> list[Tensor]:
    """Outputs of the projections stacked under `key`, one [T, widths[i]] each, whichever way they share leaves."""
    leaves: tuple[Weight, ...] = layer[key]
    biases = layer.get(key + "_bias") or (None,) * len(leaves)
    outputs: list[Tensor] = []
    for leaf, bias in zip(leaves, biases, strict=True):
        y, start = ops.linear(x, leaf, bias), 0
        while start < y.shape[1]:
            stop = start + widths[len(outputs)]
            outputs.append(y[:, start:stop])
            start = stop
    return outputs


def qkv(ops: Ops, x: Tensor, layer: Layer, config: ModelConfig) -> list[Tensor]:
    """[T, hidden] -> q [T, heads, head_dim], k and v [T, kv_heads, head_dim]."""
    return [y.reshape(x.shape[0], -1, config.head_dim) for y in stacked_linear(ops, x, layer, "qkv", config.qkv_widths)]


def attention(ops: Ops, q: Tensor, k: Tensor, v: Tensor, layer: Layer, config: ModelConfig, index: int) -> Tensor:
    """Rotary embedding, attention and output projection of layer `index`: [T, hidden], summed over the ranks."""
    rope = config.rope[index]
    y = ops.attention(ops.rope(q, rope), ops.rope(k, rope), v, index, config.attention[index])
    return ops.all_reduce(stacked_linear(ops, y.reshape(y.shape[0], -1), layer, "o", (config.hidden,))[0])


def gated_mlp(ops: Ops, x: Tensor, layer: Layer, config: ModelConfig) -> Tensor:
    """down(act(gate(x)) * up(x)): [T, hidden], summed over the ranks."""
    gate, up = stacked_linear(ops, x, layer, "gate_up", (config.intermediate, config.intermediate))
    return ops.all_reduce(stacked_linear(ops, ops.act_mul(gate, up, config.act), layer, "down", (config.hidden,))[0])


def head(ops: Ops, x: Tensor, weights: Mapping[str, Any], rows: Tensor, config: ModelConfig) -> Tensor:
    """Final norm, logits of the wanted rows and the sampled tokens: what a model returns."""
    logits = ops.linear(ops.rms_norm(x[rows], weights["norm"], config.eps), weights["head"])
    return ops.sample(logits, config.logit_softcap)
