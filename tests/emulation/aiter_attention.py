"""A stand-in for AITER's `unified_attention` on the CPU. leaks: whether it reads whole pages in decode steps, as the
real one of 0.1.7 does (ci/aiter_attention.json)."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from isthmus.platforms.triton_kit.launch import launch


def unified_attention(bind: Callable[..., object], leaks: bool) -> Callable[..., None]:
    def call(**given: Any) -> None:
        bind(**given)
        assert given["causal"] and all(given[f"{name}_descale"] is None for name in "qkv")
        assert all(given[name].is_contiguous() and given[name].dtype == torch.int32
                   for name in ("cu_seqlens_q", "seqused_k"))
        launch(KERNEL, (1,), leaks and given["max_seqlen_q"] == 1, *(given[name] for name in (
            "q", "k", "v", "out", "cu_seqlens_q", "seqused_k", "block_table")), given["softmax_scale"],
            given["window_size"][0], given["softcap"], given["max_seqlen_k"])
    return call


class Kernel:
    """Started as a Triton kernel is, so that a recorder can have it replayed."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return attend


KERNEL = Kernel()


def attend(leaks: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, starts: torch.Tensor,
           lengths: torch.Tensor, pages: torch.Tensor, scale: float, window: int, cap: float, longest: int) -> None:
    """Row by row in float32; rows of no context get what is no number."""
    page, group = k.shape[1], q.shape[1] // k.shape[2]
    for row, length in enumerate(lengths.tolist()):
        assert length <= longest
        some = slice(int(starts[row]), int(starts[row + 1]))
        used = pages[row, :-(-length // page)].long()
        keys, values = (part[used].flatten(0, 1).float().repeat_interleave(group, 1) for part in (k, v))
        if not leaks:
            keys, values = keys[:length], values[:length]
        queries = q[some].float()
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        scores = cap * torch.tanh(scores / cap) if cap > 0 else scores
        at, place = torch.arange(length - len(queries), length)[:, None], torch.arange(len(keys))
        seen = (place <= at) & ((place >= at - window) | (window < 0))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[some] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype) if length else torch.nan
