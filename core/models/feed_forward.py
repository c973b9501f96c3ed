"""Feed-forward layers, gated and dense or sparse: what configurations say about them, their weights, and the step.

Sources: Jiang et al. 2024 (Mixtral), and the published models Qwen2-MoE (a shared expert behind a sigmoid gate) and
Qwen3-MoE.
"""
from __future__ import annotations

from collections.abc import Callable

from ..platform import Ops, Tensor
from ..specs import MoESpec
from .blocks import Experts, Layer, Layout, project, projections
from .config import ACTIVATIONS, ModelConfig, Sparse
from .fields import Fields


def mixtral(fields: Fields, layers: int) -> Sparse:
    """Every layer is sparse, its experts as wide as the feed-forward."""
    return Sparse(_routing(fields, renormalize=True), (True,) * layers,
                  fields.integer("intermediate_size", high=2**22), 0)


def qwen(shared: bool) -> Callable[[Fields, int], Sparse]:
    """Every `decoder_sparse_step`-th layer is sparse, those of `mlp_only_layers` are not."""
    def parse(fields: Fields, layers: int) -> Sparse:
        step, dense = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
        if not isinstance(dense, (list, tuple)) or not all(type(i) is int for i in dense):
            raise fields.error("mlp_only_layers", dense, "a list of layer numbers")
        return Sparse(_routing(fields, fields.flag("norm_topk_prob", False)),
                      tuple((i + 1) % step == 0 and i not in dense for i in range(layers)),
                      fields.integer("moe_intermediate_size", high=2**22),
                      fields.integer("shared_expert_intermediate_size", high=2**22) if shared else 0)
    return parse


def _routing(fields: Fields, renormalize: bool) -> MoESpec:
    key = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    experts = fields.integer(key, high=4096)
    top_k = fields.integer("num_experts_per_tok", 2, high=experts)
    return MoESpec(experts, top_k, "softmax", renormalize, fields.choice("hidden_act", ACTIVATIONS, "silu"))


def layout(config: ModelConfig, index: int) -> Layout:
    """The weights of `forward` in layer `index`. Routers are whole on every rank, experts are cut along their width."""
    mlp, hidden, sparse = f"model.layers.{index}.mlp.", config.hidden, config.sparse
    if sparse is None or not sparse.layers[index]:
        return _gated_layout(mlp, config, config.intermediate)
    experts, width, parts = sparse.spec.experts, sparse.width, mlp + "experts."
    tree = {
        "router": projections([mlp + "gate"], [experts], hidden, None, False),
        "w13": Experts(parts, ("gate_proj", "up_proj"), experts, (width, hidden), 0),
        "w2": Experts(parts, ("down_proj",), experts, (hidden, width), 1),
    }
    if sparse.shared:
        tree["shared_gate"] = projections([mlp + "shared_expert_gate"], [1], hidden, None, False)
        tree |= _gated_layout(mlp + "shared_expert.", config, sparse.shared)
    return tree


def forward(ops: Ops, x: Tensor, layer: Layer, config: ModelConfig, index: int) -> Tensor:
    """[T, hidden], summed over the ranks."""
    sparse = config.sparse
    if sparse is None or not sparse.layers[index]:
        return ops.all_reduce(_gated(ops, x, layer, config, config.intermediate))
    logits = project(ops, x, layer, "router", (sparse.spec.experts,))[0]
    y = ops.moe(x, logits, layer["w13"], layer["w2"], sparse.spec)
    if sparse.shared:
        gate = project(ops, x, layer, "shared_gate", (1,))[0]
        y = y + ops.act_mul(gate, _gated(ops, x, layer, config, sparse.shared), "sigmoid")
    return ops.all_reduce(y)


def _gated_layout(prefix: str, config: ModelConfig, width: int) -> Layout:
    parts = [prefix + "gate_proj", prefix + "up_proj"]
    return {"gate_up": projections(parts, [width, width], config.hidden, 0, config.mlp_bias),
            "down": projections([prefix + "down_proj"], [config.hidden], width, 1, config.mlp_bias)}


def _gated(ops: Ops, x: Tensor, layer: Layer, config: ModelConfig, width: int) -> Tensor:
    """down(act(gate(x)) * up(x)) of this rank: [T, hidden]."""
    gate, up = project(ops, x, layer, "gate_up", (width, width))
    return project(ops, ops.act_mul(gate, up, config.act), layer, "down", (config.hidden,))[0]
