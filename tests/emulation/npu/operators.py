"""torch_npu's operators on the CPU, as plain torch: its own schemas, and what its documentation says that they compute.

A call with a wrong keyword, type or number of arguments fails on the schema; one that breaks a documented limit (a
dtype, a size, a layout) raises `RuntimeError`. `operators.txt` holds the schemas and the version that they are from;
`ci/npu_schemas.py` compares them with an installed torch_npu. Limits: Ascend/op-plugin, docs/zh/custom_APIs/torch_npu.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

SCHEMAS = Path(__file__).with_name("operators.txt")
HALVES = (torch.float16, torch.bfloat16)
_kept: list[torch.library.Library] = []


def schemas() -> tuple[str, dict[str, str]]:
    """The version of torch_npu, and each operator's schema by its name."""
    first, *lines = SCHEMAS.read_text("utf-8").splitlines()
    return first.removeprefix("# torch-npu "), {line.partition("(")[0].removeprefix("npu::"): line for line in lines}


def register() -> None:
    """Define the operators, once in a process; where torch_npu is loaded it did, and gets the CPU's kernels."""
    loaded = hasattr(torch.ops.npu, "npu_rms_norm")
    if loaded and torch._C._dispatch_has_kernel_for_dispatch_key("npu::npu_rms_norm", "CPU"):
        return
    library = torch.library.Library("npu", "FRAGMENT")
    for name, schema in schemas()[1].items():
        if not loaded:
            library.define(schema.removeprefix("npu::"))
        library.impl(name, KERNELS[name], "CPU")
    _kept.append(library)


class Calls(TorchDispatchMode):
    """Counts the operators' calls of this thread: what a step is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("npu."):
            self.counts[str(func).removeprefix("npu.").removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))


def need(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"torch_npu would refuse: {what}")


def contiguous(**tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        need(tensor is None or tensor.is_contiguous(), f"{name} is not contiguous")


# Norm, rotation, activation, and what goes to memory.

def rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    need(gamma.dtype == input.dtype and gamma.shape == input.shape[-1:], "gamma is not of the input's dtype and width")
    wide = input.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(input.dtype), rstd


def rotary_mul(input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half",
               rotate: torch.Tensor | None = None) -> torch.Tensor:
    need(input.dim() in (3, 4) and r1.dim() == input.dim() and r1.shape == r2.shape, "layouts differ")
    need(input.dtype == r1.dtype == r2.dtype, "cosines are not of the input's dtype")
    need(input.shape[-1] == r1.shape[-1] < 896 and input.shape[-1] % 2 == 0, f"head dimension {input.shape[-1]}")
    need(rotary_mode == "half" and rotate is None, "only half-split rotation is emulated")
    first, second = input.float().chunk(2, -1)
    return (input.float() * r1.float() + torch.cat((-second, first), -1) * r2.float()).to(input.dtype)


def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = input.float().chunk(2, dim)
    return (F.silu(gate) * up).to(input.dtype)


def scatter_nd_update_(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    need(indices.dtype in (torch.int32, torch.int64) and indices.shape == (len(updates), 1), "indices are not [n, 1]")
    need(updates.shape[1:] == input.shape[1:] and updates.dtype == input.dtype, "updates are not rows of the input")
    contiguous(input=input, updates=updates)
    input[indices[:, 0].long()] = updates
    return input


def format_cast(input: torch.Tensor, acl_format: int, *, customize_dtype: int | None = None,
                input_dtype: int | None = None) -> torch.Tensor:
    need(acl_format in (2, 29), "only ND and FRACTAL_NZ are emulated")
    need(input.dim() in (2, 3) and input.dtype in (*HALVES, torch.int8), f"{input.dtype} has no FRACTAL_NZ products")
    contiguous(input=input)
    return input.clone()


# Attention.

def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, atten_mask: torch.Tensor | None = None,
              actual_seq_lengths: list[int] | None = None, actual_seq_lengths_kv: list[int] | None = None,
              block_table: torch.Tensor | None = None, num_heads: int = 1, scale: float = 1.0,
              input_layout: str = "BSH", num_key_value_heads: int = 0, sparse_mode: int = 0, block_size: int = 0,
              **unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries TND or BSND over paged K and V [blocks, block_size, kv_heads * head_dim]."""
    need(query.dtype in HALVES and key.dtype == value.dtype == query.dtype, f"{query.dtype} over {key.dtype}")
    contiguous(query=query, key=key, value=value, block_table=block_table, atten_mask=atten_mask)
    need(input_layout in ("TND", "BSND") and block_table is not None and actual_seq_lengths_kv is not None,
         "only TND and BSND over pages are emulated")
    dim, kv_heads = query.shape[-1], num_key_value_heads
    need(query.shape[-2] == num_heads and num_heads % kv_heads == 0 and num_heads // kv_heads <= 64, "head counts")
    need(key.shape == value.shape == (len(key), block_size, kv_heads * dim) and kv_heads * dim <= 65535, "K's shape")
    need(block_table.dtype == torch.int32 and block_table.dim() == 2, "block_table is not int32 [rows, blocks]")
    lengths, ragged = list(actual_seq_lengths_kv), input_layout == "TND"
    if ragged:
        need(dim == 128 and block_size % 16 == 0 and block_size <= 1024, f"TND of {dim} with blocks of {block_size}")
        stops = list(actual_seq_lengths or ())
        need(stops == sorted(stops) and stops[-1:] == [len(query)] and len(stops) <= 4096, "actual_seq_lengths")
        rows = [query[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    else:
        need(dim <= 512 and dim % 8 == 0 and block_size % 16 == 0 and block_size <= 512, f"{dim}, {block_size}")
        need(query.shape[1] == 1 or block_size % 128 == 0, f"prefill with blocks of {block_size}")
        rows = list(query)
    need(len(rows) == len(lengths) == len(block_table) and min(lengths) >= 1, "rows of queries, tables and lengths")
    out = [attend_row(q, *(part[table[:-(-length // block_size)].long()].reshape(-1, kv_heads, dim)[:length].float()
                           for part in (key, value)), scale, hidden(q, length, atten_mask, sparse_mode, row, table,
                                                                    block_size, ragged))
           for row, (q, table, length) in enumerate(zip(rows, block_table, lengths, strict=True))]
    return (torch.cat(out) if ragged else torch.stack(out)).to(query.dtype), query.new_empty(0, dtype=torch.float32)


def hidden(q: torch.Tensor, length: int, mask: torch.Tensor | None, mode: int, row: int, table: torch.Tensor,
           block_size: int, ragged: bool) -> torch.Tensor:
    """bool [queries, length]: what a row's queries do not see."""
    if mask is not None:
        need(mask.dtype in (torch.bool, torch.int8, torch.uint8), f"a mask of {mask.dtype}")
    if mode == 3 and (ragged or len(q) > 1):
        need(mask is not None and mask.shape == (2048, 2048) and bool((mask == torch.ones_like(mask).triu(1)).all()),
             "sparse mode 3 takes the 2048 x 2048 triangle")
        return torch.ones(len(q), length, dtype=torch.bool).triu(length - len(q) + 1)
    need(mode in (0, 1), f"sparse mode {mode} is not emulated")
    if mask is None:
        need(mode == 0, "sparse mode 1 takes a mask")
        return torch.zeros(len(q), length, dtype=torch.bool)
    need(mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[2] == len(q), f"a mask of {list(mask.shape)}")
    need(mask.shape[3] >= len(table) * block_size, "a mask narrower than the table's blocks")
    return mask[row if len(mask) > 1 else 0, 0, :, :length].bool()


def attend_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, unseen: torch.Tensor) -> torch.Tensor:
    """[queries, heads, d] over [length, kv_heads, d] -> as q, float32."""
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v)


# Products of codes.

def convert_weight_to_int4pack(weight: torch.Tensor, inner_k_tiles: int = 0) -> torch.Tensor:
    need(weight.dtype == torch.int32 and weight.dim() == 2 and weight.shape[1] % 8 == 0, "int32 [k, n], n of 8")
    contiguous(weight=weight)
    need(bool(((weight >= -8) & (weight <= 7)).all()), "codes beyond 4 bits")
    parts = (weight & 15).unflatten(1, (-1, 8)).long()
    return (parts << 4 * torch.arange(8)).sum(-1).to(torch.int32)


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """int32 [.., n / 8] -> the 4-bit codes [.., n]."""
    return (((words[..., None] >> 4 * torch.arange(8, dtype=torch.int32) & 15) ^ 8) - 8).flatten(-2)


def weight_quant_batchmatmul(x: torch.Tensor, weight: torch.Tensor, antiquant_scale: torch.Tensor,
                             antiquant_offset: torch.Tensor | None = None, quant_scale: torch.Tensor | None = None,
                             quant_offset: torch.Tensor | None = None, bias: torch.Tensor | None = None,
                             antiquant_group_size: int = 0, inner_precise: int = 0,
                             weight_dtype: int | None = None) -> torch.Tensor:
    need(x.dtype in HALVES and antiquant_scale.dtype == x.dtype, "scales are not of x's dtype")
    need(quant_scale is None and quant_offset is None, "quantized results are not emulated")
    if weight.dtype == torch.int32:
        weight = unpacked(weight)
    else:
        need(weight.dtype == torch.int8, f"a weight of {weight.dtype}")
    inputs, outputs = weight.shape
    need(x.shape[1:] == (inputs,) and max(inputs, outputs) <= 65535, f"x {list(x.shape)}, weight {list(weight.shape)}")
    groups = 1
    if antiquant_group_size:
        need(32 <= antiquant_group_size < inputs and antiquant_group_size % 32 == 0, f"groups {antiquant_group_size}")
        groups = -(-inputs // antiquant_group_size)
    need(antiquant_scale.shape == (groups, outputs), f"scales {list(antiquant_scale.shape)}")
    need(bias is None or bias.dtype == {torch.float16: torch.float16, torch.bfloat16: torch.float32}[x.dtype], "bias")
    wide = [None if part is None else part.float().repeat_interleave(antiquant_group_size or inputs, 0)[:inputs]
            for part in (antiquant_scale, antiquant_offset)]
    if antiquant_offset is not None:
        need(antiquant_offset.shape == antiquant_scale.shape and antiquant_offset.dtype == x.dtype, "offsets")
    dense = ((weight if wide[1] is None else weight + wide[1]) * wide[0]).to(x.dtype).float()
    out = x.float() @ dense
    return (out if bias is None else out + bias.float()).to(x.dtype)


def dynamic_quant(input: torch.Tensor, *, smooth_scales: torch.Tensor | None = None, quant_mode: str = "pertoken",
                  **unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
    need(input.dtype in HALVES and smooth_scales is None and quant_mode == "pertoken", "only per token is emulated")
    scale = input.float().abs().amax(-1) / 127
    codes = (input.float() / scale.clamp_min(1e-30)[..., None]).round().clamp(-128, 127).to(torch.int8)
    return codes, scale


def quant_matmul(x1: torch.Tensor, x2: torch.Tensor, scale: torch.Tensor, *, offset: torch.Tensor | None = None,
                 pertoken_scale: torch.Tensor | None = None, bias: torch.Tensor | None = None,
                 output_dtype: int | None = None, **unused: Any) -> torch.Tensor:
    kind = {5: torch.float16, 15: torch.bfloat16}.get(output_dtype)
    need(x1.dtype == x2.dtype == torch.int8 and offset is None and kind is not None, "int8 to 16 bits is emulated")
    need(scale.dtype == torch.float32 and scale.shape == x2.shape[1:], "scales of outputs")
    need(pertoken_scale is not None and pertoken_scale.shape == (len(x1),) and pertoken_scale.dtype == torch.float32,
         "scales of tokens")
    need(bias is None or bias.dtype in (torch.float32, torch.bfloat16, torch.int32), "bias")
    out = (x1.double() @ x2.double()).float() * scale * pertoken_scale[:, None]
    return (out if bias is None else out + bias.float()).to(kind)


# The sparse layer.

def moe_gating_top_k(x: torch.Tensor, k: int, *, bias: torch.Tensor | None = None, k_group: int = 1,
                     group_count: int = 1, group_select_mode: int = 0, renorm: int = 0, norm_type: int = 0,
                     out_flag: bool = False, routed_scaling_factor: float = 1.0, eps: float = 1e-20,
                     **unused: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    experts = x.shape[-1]
    size = experts // group_count
    need(x.dim() == 2 and experts <= 2048 and experts % group_count == 0 and renorm == 0, f"{experts} experts")
    need(group_count == 1 or (size > 2 and -(-size // 32) * 32 * group_count <= 2048), f"{group_count} groups")
    need(1 <= k_group <= group_count and 1 <= k <= size * k_group, f"{k} of {k_group} groups of {size}")
    need(bias is None or (bias.shape == (experts,) and bias.dtype == x.dtype), "bias is not of x's dtype")
    scores = torch.sigmoid(x.float()) if norm_type else x.float().softmax(-1)
    grouped = (scores if bias is None else scores + bias.float()).unflatten(-1, (group_count, -1))
    best = grouped.topk(2, -1).values.sum(-1) if group_select_mode and group_count > 1 else grouped.amax(-1)
    chosen = best.argsort(dim=-1, descending=True, stable=True)[:, :k_group]
    out = torch.ones_like(best, dtype=torch.bool).scatter(1, chosen, False)
    choice = grouped.masked_fill(out[..., None], -torch.inf).flatten(1)
    ids = choice.argsort(dim=-1, descending=True, stable=True)[:, :k]
    weights = scores.gather(1, ids)
    if norm_type:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), ids.int(), scores if out_flag else torch.empty_like(scores)


def moe_init_routing_v2(x: torch.Tensor, expert_idx: torch.Tensor, *, scale: torch.Tensor | None = None,
                        offset: torch.Tensor | None = None, active_num: int = -1, expert_capacity: int = -1,
                        expert_num: int = -1, drop_pad_mode: int = 0, expert_tokens_num_type: int = 0,
                        expert_tokens_num_flag: bool = False, quant_mode: int = -1,
                        active_expert_range: list[int] = (), row_idx_type: int = 0,
                        x_dtype: int | None = None) -> tuple[torch.Tensor, ...]:
    contiguous(x=x, expert_idx=expert_idx)
    need(expert_idx.dtype == torch.int32 and expert_idx.dim() == x.dim() == 2, "expert_idx is not int32 [rows, k]")
    need((quant_mode, drop_pad_mode, row_idx_type, scale, offset) == (-1, 0, 0, None, None), "only plain rows here")
    need(expert_tokens_num_flag and expert_tokens_num_type == 1 and list(active_expert_range) == [0, expert_num]
         and active_num == expert_idx.numel(), "only counts of all experts are emulated")
    flat = expert_idx.flatten().long()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    counts = torch.zeros(expert_num, dtype=torch.int64).scatter_add_(0, flat, torch.ones_like(flat))
    return x[order // expert_idx.shape[1]], places.int(), counts, torch.zeros(len(order))


def grouped_matmul(x: list[torch.Tensor], weight: list[torch.Tensor], *, antiquant_scale: list[torch.Tensor] = (),
                   antiquant_offset: list[torch.Tensor] = (), group_list: torch.Tensor | None = None,
                   split_item: int = 0, group_type: int | None = None, group_list_type: int = 0,
                   **unused: Any) -> list[torch.Tensor]:
    """One x, one weight [groups, in, out], one result. Codes have scales and offsets [groups, out]; those of 4 bits,
    eight in an int32, may have them [groups, runs of inputs, out]."""
    (rows,), (matrices,) = x, weight
    need(split_item in (2, 3) and group_type == 0 and group_list_type == 1, "only counts of rows are emulated")
    need(group_list is not None and group_list.dtype == torch.int64 and len(group_list) == len(matrices) <= 1024,
         "group_list is not int64, one for each matrix")
    need(matrices.dim() == 3 and rows.shape[1] == matrices.shape[1] and max(matrices.shape[1:]) < 65536, "shapes")
    if matrices.dtype in (torch.int8, torch.int32):
        (scale,), (offset,) = antiquant_scale, antiquant_offset
        codes = matrices if matrices.dtype == torch.int8 else unpacked(matrices)
        if scale.dim() == 3:
            need(matrices.dtype == torch.int32 and codes.shape[1] % scale.shape[1] == 0, "groups of 8-bit codes")
        wide = [part.float().reshape(len(part), -1, part.shape[-1]) for part in (scale, offset)]
        need(scale.dtype == offset.dtype == rows.dtype in HALVES and scale.shape == offset.shape
             and wide[0].shape[::2] == codes.shape[::2], "scales of codes")
        wide = [part.repeat_interleave(codes.shape[1] // part.shape[1], 1) for part in wide]
        dense = ((codes + wide[1]) * wide[0]).to(rows.dtype)
    else:
        need(matrices.dtype == rows.dtype and not antiquant_scale, f"{rows.dtype} by {matrices.dtype}")
        dense = matrices
    stops = group_list.cumsum(0)
    group = (torch.arange(len(rows))[:, None] >= stops).sum(1).clamp_max(len(matrices) - 1)
    return [torch.bmm(rows[:, None].float(), dense.float()[group])[:, 0].to(rows.dtype)]


def moe_finalize_routing(rows: torch.Tensor, skip1: torch.Tensor | None, skip2: torch.Tensor | None,
                         bias: torch.Tensor | None, scales: torch.Tensor | None, places: torch.Tensor,
                         experts: torch.Tensor | None, drop_pad_mode: int = 0, k: int = 1) -> torch.Tensor:
    need(drop_pad_mode == 2 and skip1 is None and skip2 is None and bias is None, "only rows of tokens are emulated")
    need(scales is not None and scales.dtype == rows.dtype and scales.numel() == len(places), "scales")
    need(places.dtype == torch.int32, "places are not int32")
    return (rows[places.long()].unflatten(0, scales.shape).float() * scales.float()[..., None]).sum(1).to(rows.dtype)


KERNELS: dict[str, Callable[..., Any]] = {
    "npu_convert_weight_to_int4pack": convert_weight_to_int4pack, "npu_dynamic_quant": dynamic_quant,
    "npu_format_cast": format_cast, "npu_fused_infer_attention_score": attention, "npu_grouped_matmul": grouped_matmul,
    "npu_moe_finalize_routing": moe_finalize_routing, "npu_moe_gating_top_k": moe_gating_top_k,
    "npu_moe_init_routing_v2": moe_init_routing_v2, "npu_quant_matmul": quant_matmul, "npu_rms_norm": rms_norm,
    "npu_rotary_mul": rotary_mul, "npu_scatter_nd_update_": scatter_nd_update_, "npu_swiglu": swiglu,
    "npu_weight_quant_batchmatmul": weight_quant_batchmatmul}
