"""Parts that the model definitions share: pure functions over `Ops`, and the layout of the weights they use.

A layout is a nested mapping of the weight tree's own shape: an `Entry` stands for one leaf, `Projections` for a
`Stack` of leaves, `Experts` for one leaf.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ..platform import Ops, Tensor, Weight
from ..specs import Cut, Role
from .config import ModelConfig

Layer = Mapping[str, Any]
Layout = dict[str, Any]
QK_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}


class Entry(NamedTuple):
    """One tensor of the checkpoint, the shape it must have and what it is for (`role` and `cut` as in `WeightSpec`).
    dtype: that it is loaded in, None = the model's."""

    name: str
    role: Role
    shape: tuple[int, ...]
    cut: Cut = None
    dtype: str | None = None


class Projections(NamedTuple):
    """Linear projections of one input, to be stacked along the output axis: one leaf for each run of neighbours in the
    same format, so that parts of different formats keep their own. `biases` is empty, or has one for each weight."""

    weights: tuple[Entry, ...]
    biases: tuple[Entry, ...]


class Experts(NamedTuple):
    """Matrices `shape` = (out, in) called `parts` of every expert, stacked along the output axis; a checkpoint keeps
    each as one tensor [experts, out, in], or expert by expert."""

    prefix: str
    parts: tuple[str, ...]
    experts: int
    shape: tuple[int, int]
    cut: Cut

    def entries(self, names: Collection[str]) -> tuple[Entry, ...]:
        """What a checkpoint with these tensors has of them, in the order of `WeightSpec.names`."""
        stacked = [f"{self.prefix}{part}.weight" for part in self.parts]
        if all(name in names for name in stacked):
            return tuple(Entry(name, "experts", (self.experts, *self.shape), self.cut) for name in stacked)
        return tuple(Entry(f"{self.prefix}{number}.{part}.weight", "experts", self.shape, self.cut)
                     for number in range(self.experts) for part in self.parts)


def projections(names: Sequence[str], widths: Sequence[int], width_in: int, cut: Cut, bias: bool) -> Projections:
    """Projections called `names`, of [widths[i], width_in]."""
    pairs = list(zip(names, widths, strict=True))
    return Projections(tuple(Entry(f"{n}.weight", "linear", (w, width_in), cut) for n, w in pairs),
                       tuple(Entry(f"{n}.bias", "bias", (w,), cut) for n, w in pairs if bias))


def attention_layout(config: ModelConfig, index: int) -> Layout:
    """The projections around attention in layer `index`, and the norms on each head of q and k where there are some."""
    attn, inner = f"model.layers.{index}.self_attn.", config.heads * config.head_dim
    heads = [attn + part for part in ("q_proj", "k_proj", "v_proj")]
    tree = {"qkv": projections(heads, config.qkv_widths, config.hidden, 0, config.qkv_bias),
            "o": projections([attn + "o_proj"], [config.hidden], inner, 1, config.o_bias)}
    return tree | norm_layout(index, config.head_dim, QK_NORMS) if config.qk_norm else tree


def norm_layout(index: int, width: int, names: Mapping[str, str]) -> Layout:
    """Norms of one layer: key in the tree -> name in the checkpoint."""
    return {key: Entry(f"model.layers.{index}.{name}.weight", "norm", (width,)) for key, name in names.items()}


def model_layout(config: ModelConfig, layers: list[Layout]) -> Layout:
    """The whole tree around `layers`; a tied model has no `head` here, the loader puts the embedding's leaf there."""
    matrix = (config.vocab_size, config.hidden)
    layout = {"embed": Entry("model.embed_tokens.weight", "embed", matrix), "layers": layers,
              "norm": Entry("model.norm.weight", "norm", (config.hidden,))}
    return layout if config.tied else layout | {"head": Entry("lm_head.weight", "linear", matrix)}


class Stack(NamedTuple):
    """The leaves of `Projections`: (weight,) or (weight, bias) of each run of neighbours that share them. A named
    tuple, as are those of adapters, since libraries take these apart by themselves."""

    runs: tuple[tuple[Weight, ...], ...]

    def outputs(self, ops: Ops, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """One [T, widths[i]] for each projection."""
        outputs: list[Tensor] = []
        for leaves in self.runs:
            y, start = ops.linear(x, *leaves), 0
            while start < y.shape[1]:
                stop = start + widths[len(outputs)]
                outputs.append(y[:, start:stop])
                start = stop
        return outputs


def project(ops: Ops, x: Tensor, layer: Layer, key: str, widths: Sequence[int]) -> list[Tensor]:
    """Outputs of the projections under `key`, one [T, widths[i]] each, whichever way they share leaves."""
    return layer[key].outputs(ops, x, widths)


def qkv(ops: Ops, x: Tensor, layer: Layer, config: ModelConfig) -> list[Tensor]:
    """[T, hidden] -> q [T, heads, head_dim], k and v [T, kv_heads, head_dim], norms on q and k applied."""
    q, k, v = (y.reshape(x.shape[0], -1, config.head_dim) for y in project(ops, x, layer, "qkv", config.qkv_widths))
    if config.qk_norm:
        q, k = ops.rms_norm(q, layer["q_norm"], config.eps), ops.rms_norm(k, layer["k_norm"], config.eps)
    return [q, k, v]


def attention(ops: Ops, q: Tensor, k: Tensor, v: Tensor, layer: Layer, config: ModelConfig, index: int) -> Tensor:
    """Rotary embedding, attention and output projection of layer `index`: [T, hidden], summed over the ranks."""
    rope = config.rope[index]
    y = ops.attention(ops.rope(q, rope), ops.rope(k, rope), v, config.first_state + index, config.attention[index])
    return ops.all_reduce(project(ops, y.reshape(y.shape[0], -1), layer, "o", (config.hidden,))[0])


def head(ops: Ops, x: Tensor, weights: Mapping[str, Any], rows: Tensor, config: ModelConfig) -> Tensor:
    """Final norm, logits of the wanted rows and the sampled tokens: what a model returns."""
    logits = ops.linear(ops.rms_norm(x[rows], weights["norm"], config.eps), weights["head"])
    return ops.sample(logits, config.logit_softcap)
