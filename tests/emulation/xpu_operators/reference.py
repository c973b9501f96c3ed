"""vllm-xpu-kernels' operators in CPU torch: its own schemas, and kernels that do what its sources do, checks included.

A wrong keyword, number of arguments or kind of argument is refused by the schema, a wrong dtype, layout or shape by the
checks below. Source: csrc/ and tests/ of the project vllm-xpu-kernels, read, at the version that `schemas.toml` names.
"""
from __future__ import annotations

from functools import cache, partial

import torch
from isthmus.platforms.xpu.operators import expected
from torch.nn import functional as F

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LOCAL_PAGES = (16, 64)  # windows are compiled for these alone, as in the package's default build


def check(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


def rms_norm(result: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    check(result.is_contiguous() and 2 <= input.ndim <= 4 and input.dtype in FLOATS, "rms_norm: result or input")
    check(result.shape == input.shape and result.dtype == input.dtype, "rms_norm: result is not like input")
    wide = input.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(input.dtype)
    if weight is not None:
        check(weight.dtype == input.dtype, f"expected scalar type {input.dtype} but found {weight.dtype}")
        check(weight.is_contiguous() and weight.shape == input.shape[-1:], "rms_norm: weight")
        normed = normed * weight
    result.copy_(normed)


def act_and_mul(act, out: torch.Tensor, input: torch.Tensor) -> None:
    check(input.is_contiguous() and out.is_contiguous() and input.dtype in FLOATS, "activation: layout or dtype")
    check(out.dtype == input.dtype and out.shape == (*input.shape[:-1], input.shape[-1] // 2), "activation: out")
    gate, up = input.chunk(2, -1)
    out.copy_(act(gate.float()).to(input.dtype) * up)


def reshape_and_cache_flash(
        key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
        slot_mapping: torch.Tensor, kv_cache_dtype: str, k_scale: torch.Tensor, v_scale: torch.Tensor) -> None:
    check(slot_mapping.dtype == torch.int64, f"expected scalar type Long but found {slot_mapping.dtype}")
    check(kv_cache_dtype == "auto" and k_scale.dtype == v_scale.dtype == torch.float32, "cache: kind or scales")
    page_size = key_cache.shape[1]
    for new, kept in ((key, key_cache), (value, value_cache)):
        check(new.dtype == kept.dtype and new.dtype in FLOATS and new[0].is_contiguous(), "cache: dtype or layout")
        check(kept.stride()[2:] == (new.shape[2], 1), "cache: heads are not beside each other")
        used = slot_mapping >= 0
        slots = slot_mapping[used]
        kept[slots // page_size, slots % page_size] = new[:len(slot_mapping)][used]


def varlen_fwd(
        q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q,
        max_seqlen_k, p_dropout, q_scale, k_scale, v_scale, softmax_scale, softmax_sink, zero_tensors, is_causal,
        window_size_left, window_size_right, softcap, return_softmax, gen, num_splits, mix_batch, splits_per_seq,
        work_list) -> list[torch.Tensor]:
    """Paged only. What the real one would ignore without a word is refused too: soft caps, slopes, padding left."""
    check(q.dtype in HALVES and k.dtype == q.dtype and v.dtype == q.dtype, "query and key must have the same dtype")
    check(q.ndim == 3 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "query must be in ragged format")
    for name, part in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k), ("seqused_k", seqused_k),
                       ("page_table", block_table)):
        check(part.dtype == torch.int32 and part.stride(-1) == 1, f"{name} must have dtype torch.int32")
    check(out is not None and out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous(), "out")
    check(k.shape[1] % 16 == 0, f"chunk_prefill: unsupported block_size={k.shape[1]}")
    check(q.shape[2] <= 512, "FMHA forward only supports head dimension at most 512")
    unused = (leftpad_k, alibi_slopes, q_scale, k_scale, v_scale, softmax_sink, gen, splits_per_seq, work_list)
    check(softcap == 0 and p_dropout == 0 and all(part is None for part in unused), "not of this platform's cases")
    local = window_size_left != -1 or window_size_right != -1
    check(not local or k.shape[1] in LOCAL_PAGES, "Paged decode kernel tuple not compiled for this configuration.")
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    counts = [stop - start for start, stop in zip(starts, starts[1:], strict=False)]
    check(len(counts) == len(lengths) == len(block_table), "rows of starts, lengths and pages differ")
    check(max(counts) <= max_seqlen_q and max(lengths) <= max_seqlen_k and min(lengths) > 0, "longest rows, or empty")
    check(is_causal or max_seqlen_q == 1, "several tokens of a row that see each other")
    for row, (start, count, length) in enumerate(zip(starts, counts, lengths, strict=False)):
        pages = block_table[row, :-(-length // k.shape[1])].long()
        keys, values = (part[pages].flatten(0, 1)[:length].float().repeat_interleave(q.shape[1] // k.shape[2], 1)
                        for part in (k, v))
        at = torch.arange(length - count, length)[:, None]
        places = torch.arange(length)
        seen = places <= at
        if window_size_left != -1:
            seen = seen & (places >= at - window_size_left)
        scores = torch.einsum("qhd,khd->hqk", q[start:start + count].float(), keys) * softmax_scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[start:start + count] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return [out, torch.empty(0)]


def fp8_gemm_w8a16(A: torch.Tensor, B: torch.Tensor, B_scale_: torch.Tensor | None, bias_: torch.Tensor | None,
                   ) -> torch.Tensor:
    check(A.dtype in HALVES and A.ndim in (2, 3) and A.is_contiguous(), f"Unsupported data type: {A.dtype}")
    check(B.dtype in FP8 and B.ndim == 2, "weight must be f8_e5m2 or f8_e4m3fn for fp8 matmul")
    check(B.shape[0] == A.shape[-1] and 1 in B.stride(), "fp8 matmul: shapes")
    wide = B.float()
    if B_scale_ is not None:
        check(B_scale_.is_contiguous() and B_scale_.numel() in (1, B.shape[1]), "fp8 matmul: scale")
        wide = wide * B_scale_.float().reshape(1, -1)
    return with_bias(A.float() @ wide, bias_, A.dtype)


def int4_gemm_w4a16(A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, B_scale: torch.Tensor,
                    B_zp: torch.Tensor, group_size: int, g_idx: torch.Tensor | None) -> torch.Tensor:
    width, outputs = A.shape[-1], B.shape[1]
    check(A.dtype in HALVES and A.is_contiguous() and g_idx is None, f"Unsupported data type for int4: {A.dtype}")
    check(B.dtype == torch.int32 and B.shape[0] * 8 == width and B.stride(0) == 1, "int4: weight [k/8, n] transposed")
    check(B_scale.dtype == A.dtype and B_scale.shape == (width // group_size, outputs) and B_scale.is_contiguous(),
          "int4: scale [k/group_size, n]")
    if B_zp.ndim == 1:
        check(B_zp.dtype == torch.int8 and B_zp.numel() == 1, "int4: one zero point in int8")
        zero = B_zp.float().reshape(1, 1)
    else:
        check(B_zp.dtype == torch.int32 and B_zp.shape == (width // group_size, outputs // 8), "int4: zero points")
        zero = nibbles(B_zp).repeat_interleave(group_size, 0)
    codes = nibbles(B.t()).t()
    return with_bias(A.float() @ ((codes - zero) * B_scale.float().repeat_interleave(group_size, 0)), bias, A.dtype)


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, n] -> float32 [rows, 8 n], the lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (words[..., None] >> shifts & 15).flatten(-2).float()


def with_bias(product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if bias is not None:
        check(bias.dtype == dtype and bias.shape == product.shape[-1:], f"bias is {bias.dtype}, not {dtype}")
        product = product + bias.float()
    return product.to(dtype)


def cutlass_grouped_gemm_interface(
        ptr_A: torch.Tensor, ptr_A_scale: torch.Tensor | None, ptr_B: torch.Tensor, ptr_B_scale: torch.Tensor | None,
        ptr_bias: torch.Tensor | None, ptr_D: torch.Tensor, rows_per_expert: torch.Tensor, N: int, K: int,
        num_experts: int) -> torch.Tensor:
    check(ptr_A.dtype in HALVES and ptr_B.dtype == ptr_D.dtype == ptr_A.dtype, "only supports BFloat16 and Half")
    check(ptr_A_scale is None and ptr_B_scale is None and ptr_bias is None, "scales and bias are not used here")
    check(all(part.is_contiguous() for part in (ptr_A, ptr_B, ptr_D)), "ptr_A must be contiguous")
    check(ptr_B.shape == (num_experts, K, N) and N % 8 == 0, "ptr_B must be 3D [num_experts, K, N]")
    check(ptr_A.shape[1] == K and ptr_D.shape == (len(ptr_A), N), "ptr_A.size(0) must match ptr_D.size(0)")
    check(rows_per_expert.dtype == torch.int32 and len(rows_per_expert) == num_experts, "rows_per_expert")
    parts = ptr_A.float().split(rows_per_expert.tolist())
    ptr_D.copy_(torch.cat([part @ ptr_B[expert].float() for expert, part in enumerate(parts)]))
    return ptr_D


def remap_hidden_states(
        hidden_states: torch.Tensor, hidden_states_scales: torch.Tensor | None, remapped_hidden_states: torch.Tensor,
        remapped_hidden_states_scales: torch.Tensor | None, expert_map: torch.Tensor | None,
        rows_per_expert: torch.Tensor, unpermuted_row_to_permuted_row: torch.Tensor, topk_ids: torch.Tensor,
        total_experts_num: int, local_experts_num: int) -> None:
    tokens, top_k = topk_ids.shape
    check(hidden_states.dtype == remapped_hidden_states.dtype, "hidden_states and remapped_hidden_states: dtype")
    check(hidden_states_scales is None and remapped_hidden_states_scales is None and expert_map is None, "not used")
    check(rows_per_expert.dtype == unpermuted_row_to_permuted_row.dtype == torch.int32, "rows_per_expert must be int32")
    check(topk_ids.dtype in (torch.int32, torch.int64), "topk_ids must be int64 or int32")
    check(remapped_hidden_states.shape == (tokens * top_k, hidden_states.shape[1]), "remapped_hidden_states: shape")
    check(hidden_states.is_contiguous() and hidden_states.shape[1] % 8 == 0, "hidden_size must be divisible")
    check(total_experts_num == local_experts_num == len(rows_per_expert) <= 1024, "experts")
    check(not rows_per_expert.any(), "rows_per_expert is counted up from what it holds")
    flat = topk_ids.flatten().long()
    # Within an expert the real one's order is that of its atomics: any will do, so it is not the obvious one here.
    order = (flat * len(flat) - torch.arange(len(flat))).argsort()
    remapped_hidden_states.copy_(hidden_states[order // top_k])
    unpermuted_row_to_permuted_row.copy_(order.argsort().view(tokens, top_k))
    rows_per_expert.add_(flat.bincount(minlength=local_experts_num).int())


def moe_gather(output: torch.Tensor, moe_output: torch.Tensor, topk_weights: torch.Tensor,
               unpermuted_row_to_permuted_row: torch.Tensor, num_experts: int) -> None:
    tokens, top_k = topk_weights.shape
    check(topk_weights.dtype == torch.float32 and topk_weights.is_contiguous(), "topk_weights must be float32")
    check(top_k in (1, 2, 4, 6, 8, 10), f"error: not support TOPK={top_k}")
    check(output.dtype == moe_output.dtype and moe_output.shape == (tokens * top_k, output.shape[1]), "moe_output")
    check(unpermuted_row_to_permuted_row.dtype == torch.int32, "rows must be int32")
    rows = moe_output[unpermuted_row_to_permuted_row.long()].float()
    output.copy_((rows * topk_weights[..., None]).sum(1))


KERNELS = {"rms_norm": rms_norm, "silu_and_mul": partial(act_and_mul, F.silu), "gelu_and_mul": partial(
    act_and_mul, F.gelu), "gelu_tanh_and_mul": partial(act_and_mul, partial(F.gelu, approximate="tanh"))} | {
    kernel.__name__: kernel for kernel in (
        reshape_and_cache_flash, varlen_fwd, fp8_gemm_w8a16, int4_gemm_w4a16, cutlass_grouped_gemm_interface,
        remap_hidden_states, moe_gather)}


@cache
def register() -> dict[str, torch.library.Library]:
    """Define the operators of `schemas.toml` for the CPU, once; the libraries, which take them along when they go."""
    libraries: dict[str, torch.library.Library] = {}
    for name, schema in expected().items():
        space, _, short = name.partition("::")
        library = libraries.setdefault(space, torch.library.Library(space, "FRAGMENT"))
        library.define(schema.partition("::")[2])
        library.impl(short, KERNELS[short], "CPU")
    return libraries
