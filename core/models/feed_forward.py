"""Feed-forward layers, gated and dense or sparse: what configurations say about them, their weights, and the step.

Sources: Jiang et al. 2024 (Mixtral), DeepSeek-AI 2024 (DeepSeek-V3), and the published models Qwen2-MoE (a shared
expert behind a sigmoid gate) and Qwen3-MoE.
"""
from __future__ import annotations

from collections.abc import Callable

from ..platform import Ops, Tensor
from ..specs import MoESpec
from .blocks import Entry, Experts, Layer, Layout, project, projections
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


def deepseek(fields: Fields, layers: int) -> Sparse:
    """As DeepSeek-V3: sparse from layer `first_k_dense_replace` on, sigmoid scores with a bias, groups of experts, and
    `n_shared_experts` side by side as one without a gate."""
    for key, known in (("scoring_func", ("sigmoid", "noaux_tc")), ("topk_method", ("noaux_tc",))):
        fields.choice(key, dict.fromkeys(known, ""), known[0])
    experts = fields.integer("n_routed_experts", high=4096)
    groups = fields.integer("n_group", 1, high=experts)
    if experts % groups or experts < 2 * groups:
        raise fields.error("n_group", groups, f"a divisor of n_routed_experts = {experts}, with 2 or more in a group")
    top_groups = fields.integer("topk_group", 1, high=groups)
    spec = MoESpec(experts, fields.integer("num_experts_per_tok", high=experts // groups * top_groups), "sigmoid",
                   fields.flag("norm_topk_prob", False), fields.choice("hidden_act", ACTIVATIONS, "silu"),
                   fields.number("routed_scaling_factor", 1.0), groups, top_groups)
    width, dense = fields.integer("moe_intermediate_size", high=2**20), fields.integer("first_k_dense_replace", 0, 0)
    return Sparse(spec, tuple(i >= dense for i in range(layers)), width,
                  width * fields.integer("n_shared_experts", low=0, high=1024), gated=False, bias=True)


def _routing(fields: Fields, renormalize: bool) -> MoESpec:
    key = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    experts = fields.integer(key, high=4096)
    top_k = fields.integer("num_experts_per_tok", 2, high=experts)
    return MoESpec(experts, top_k, "softmax", renormalize, fields.choice("hidden_act", ACTIVATIONS, "silu"))


def layout(config: ModelConfig, index: int) -> Layout:
    """The weights of `forward` in layer `index`. Routers are whole on every rank; experts are cut along their width, or
    some are on each rank."""
    mlp, hidden, sparse = f"model.layers.{index}.mlp.", config.hidden, config.sparse
    if sparse is None or not sparse.layers[index]:
        return _gated_layout(mlp, config, config.intermediate)
    experts, width, parts = sparse.spec.experts, sparse.width, mlp + "experts."
    cut = "expert" if sparse.apart else None
    tree = {
        "router": projections([mlp + "gate"], [experts], hidden, None, False),
        "w13": Experts(parts, ("gate_proj", "up_proj"), experts, (width, hidden), cut or 0),
        "w2": Experts(parts, ("down_proj",), experts, (hidden, width), cut or 1),
    }
    if sparse.bias:
        tree["router_bias"] = Entry(mlp + "gate.e_score_correction_bias", "bias", (experts,), dtype="f32")
    if sparse.shared and sparse.gated:
        tree["shared_gate"] = projections([mlp + "shared_expert_gate"], [1], hidden, None, False)
    if sparse.shared:
        tree |= _gated_layout(mlp + "shared_expert.", config, sparse.shared)
    return tree


def forward(ops: Ops, x: Tensor, layer: Layer, config: ModelConfig, index: int) -> Tensor:
    """[T, hidden], summed over the ranks."""
    sparse = config.sparse
    if sparse is None or not sparse.layers[index]:
        return ops.all_reduce(_gated(ops, x, layer, config, config.intermediate))
    logits = project(ops, x, layer, "router", (sparse.spec.experts,))[0]
    bias = (layer["router_bias"],) if sparse.bias else ()  # a platform without the feature may have no such parameter
    y = ops.moe(x, logits, layer["w13"], layer["w2"], sparse.spec, *bias)
    if sparse.shared:
        shared = _gated(ops, x, layer, config, sparse.shared)
        if sparse.gated:
            shared = ops.act_mul(project(ops, x, layer, "shared_gate", (1,))[0], shared, "sigmoid")
        y = y + shared
    return ops.all_reduce(y)


def _gated_layout(prefix: str, config: ModelConfig, width: int) -> Layout:
    parts = [prefix + "gate_proj", prefix + "up_proj"]
    return {"gate_up": projections(parts, [width, width], config.hidden, 0, config.mlp_bias),
            "down": projections([prefix + "down_proj"], [config.hidden], width, 1, config.mlp_bias)}


def _gated(ops: Ops, x: Tensor, layer: Layer, config: ModelConfig, width: int) -> Tensor:
    """down(act(gate(x)) * up(x)) of this rank: [T, hidden]."""
    gate, up = project(ops, x, layer, "gate_up", (width, width))
    return project(ops, ops.act_mul(gate, up, config.act), layer, "down", (config.hidden,))[0]
