"""The sparse layer by torch_npu's operators: choice, sort by expert, grouped products, weighted sum. Nobody waits."""
from __future__ import annotations

import torch

from ...core.platform import MoESpec
from ..accelerator import moe as composed
from ..accelerator.quant import Experts


def act_mul(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    """One launch where gate and up are the halves of one product, as a model's are; else composed."""
    if kind == "silu" and halves(gate, up):
        width = gate.shape[-1]
        return torch.ops.npu.npu_swiglu(gate.as_strided((len(gate), 2 * width), (2 * width, 1)))
    return composed.act_mul(gate, up, kind)


def halves(gate: torch.Tensor, up: torch.Tensor) -> bool:
    """Do the rows of `up` follow those of `gate` in memory, each after its own?"""
    width = gate.shape[-1]
    return (gate.dim() == 2 and gate.shape == up.shape and gate.dtype == up.dtype and len(gate) > 0
            and gate.stride() == up.stride() == (2 * width, 1)
            and up.data_ptr() == gate.data_ptr() + width * gate.element_size())


def reason_against_choice(spec: MoESpec) -> str | None:
    """Why the router's choice is not the operator's."""
    size = spec.experts // spec.groups
    if spec.scoring == "sigmoid" and not spec.renormalize:
        return "the operator renormalizes sigmoids in any case"
    if spec.groups > 1 and (size <= 2 or -(-size // 32) * 32 * spec.groups > 2048):
        return f"{spec.groups} groups of {size}: more than 2 in each, and 2048 in all in runs of 32, are taken"
    if spec.experts > 2048 or spec.top_k > size * spec.top_groups:
        return f"{spec.top_k} of {spec.experts} experts: up to 2048, and no more than the groups chosen have"
    return None


def route(logits: torch.Tensor, spec: MoESpec, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [T, experts] -> experts int32 [T, top_k] and their weights, float32 [T, top_k]."""
    if reason_against_choice(spec) is not None:
        chosen, weights = composed.route(logits, spec, bias)
        return chosen.int(), weights
    sigmoid = spec.scoring == "sigmoid"
    after = spec.renormalize and not sigmoid  # the operator leaves softmax as it is
    weights, chosen, _ = torch.ops.npu.npu_moe_gating_top_k(
        logits.float(), spec.top_k, bias=bias, k_group=spec.top_groups, group_count=spec.groups,
        group_select_mode=int(bias is not None), renorm=0, norm_type=int(sigmoid),
        routed_scaling_factor=1.0 if after else spec.scale, eps=1e-20)
    if after:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * spec.scale
    return chosen, weights


def moe(x: torch.Tensor, logits: torch.Tensor, w13: Experts, w2: Experts, spec: MoESpec,
        bias: torch.Tensor | None) -> torch.Tensor:
    """[T, D] -> [T, D]; the sum over a token's experts is taken in float32."""
    chosen, weights = route(logits, spec, bias)
    rows, places, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x.contiguous(), chosen, active_num=chosen.numel(), expert_num=spec.experts, expert_tokens_num_type=1,
        expert_tokens_num_flag=True, active_expert_range=[0, spec.experts], quant_mode=-1, row_idx_type=0)
    both = w13.weight.grouped(rows, counts)
    width = both.shape[-1] // 2
    out = w2.weight.grouped(act_mul(both[:, :width], both[:, width:], spec.act).contiguous(), counts)
    return torch.ops.npu.npu_moe_finalize_routing(
        out.float(), None, None, None, weights, places, None, drop_pad_mode=2).to(x.dtype)
