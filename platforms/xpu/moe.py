"""The sparse feed-forward by vllm-xpu-kernels: rows moved to their experts, CUTLASS' grouped products, gathered again.

Choosing the experts stays with `accelerator.moe.route`: the package's own choice does not promise the lower expert in a
tie. No count reaches the host.
"""
from __future__ import annotations

import torch

from ...core.platform import MoESpec
from ..accelerator.moe import route
from .operators import Operators

ACTIVATIONS = {"silu": "silu_and_mul", "gelu": "gelu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}
CHOICES = (1, 2, 4, 6, 8, 10)  # experts of a token that the package is compiled for
EXPERTS = 1024                 # and of a layer, at most


def reason_against(spec: MoESpec) -> str | None:
    """Why the operators do not compute this layer."""
    if spec.top_k not in CHOICES or spec.experts > EXPERTS:
        return f"{spec.top_k} of {spec.experts} experts: the operators know {CHOICES} of {EXPERTS} at most"
    return None if spec.act in ACTIVATIONS else f"activation {spec.act!r}; the operators know {', '.join(ACTIVATIONS)}"


class Products:
    """The five operators that make up the layer."""

    needs = frozenset({"remap_hidden_states", "cutlass_grouped_gemm_interface", "moe_gather", *ACTIVATIONS.values()})

    def __init__(self, operators: Operators) -> None:
        self.operators = operators

    def moe(self, x: torch.Tensor, logits: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, spec: MoESpec,
            bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, D], w13 [experts, D, 2F], w2 [experts, F, D], all in one type of 16 bits -> [T, D]."""
        x, (tokens, width), experts = x.contiguous(), x.shape, len(w13)
        chosen, weights = route(logits, spec, bias)
        rows = torch.zeros(experts, dtype=torch.int32, device=x.device)
        places = torch.empty((tokens, spec.top_k), dtype=torch.int32, device=x.device)
        sent = torch.empty((tokens * spec.top_k, width), dtype=x.dtype, device=x.device)
        self.operators["remap_hidden_states"](
            hidden_states=x, hidden_states_scales=None, remapped_hidden_states=sent,
            remapped_hidden_states_scales=None, expert_map=None, rows_per_expert=rows,
            unpermuted_row_to_permuted_row=places, topk_ids=chosen.int(), total_experts_num=experts,
            local_experts_num=experts)
        both = self._product(sent, w13, rows)
        hidden = torch.empty((len(both), w2.shape[1]), dtype=x.dtype, device=x.device)
        self.operators[ACTIVATIONS[spec.act]](hidden, both)
        out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
        self.operators["moe_gather"](output=out, moe_output=self._product(hidden, w2, rows), topk_weights=weights,
                                     unpermuted_row_to_permuted_row=places, num_experts=experts)
        return out

    def _product(self, x: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Rows of x, expert after expert, `rows` of each, times the matrix of their expert."""
        experts, width, outputs = weight.shape
        out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
        self.operators["cutlass_grouped_gemm_interface"](
            ptr_A=x, ptr_A_scale=None, ptr_B=weight, ptr_B_scale=None, ptr_bias=None, ptr_D=out,
            rows_per_expert=rows, N=outputs, K=width, num_experts=experts)
        return out
