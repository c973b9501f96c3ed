"""Paged attention by vllm-xpu-kernels' `varlen_fwd`: split contexts for rows of one token, tiles of queries for others.

Its package is compiled for some heads, pages and windows; which, it tells by refusing. So each case is tried once, on
page 0, before it is taken. It does nothing with a soft cap, so such a case is never its own.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ...core.platform import AttentionSpec, Bucket
from ..accelerator.attention import View
from ..accelerator.cache import LayerCache

log = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
WIDEST = 512     # elements of a head
REFUSALS = ("not compiled", "nsupported", "only supports")  # what the package says of a case that it leaves out
PAGE_STEP = 16   # tokens that a page must be a multiple of


class PagedAttention:
    """refused: the cases that were tried in vain, with the operator's reason."""

    name = "vllm-xpu-kernels"

    def __init__(self, varlen_fwd: Callable[..., Any]) -> None:
        self.varlen_fwd = varlen_fwd
        self.refused: dict[AttentionSpec, str] = {}

    def takes(self, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec) -> bool:
        """Whether the case can be its own; q [T, heads, head_dim] and a layer's memory."""
        if (q.dtype not in DTYPES or cache.kv.dtype != q.dtype or spec.softcap is not None
                or cache.page_size % PAGE_STEP or q.shape[2] > WIDEST or q.shape[2] % 8):
            return False
        counts = torch.tensor([1, 2], dtype=torch.int32, device=q.device)
        pages = torch.zeros((1, 1), dtype=torch.int32, device=q.device)
        try:
            for tokens in (1, 2):
                starts = torch.tensor([0, tokens], dtype=torch.int32, device=q.device)
                trial = torch.zeros((tokens, *q.shape[1:]), dtype=q.dtype, device=q.device)
                self._call(trial, LayerCache(cache.kv[:1]), starts, counts[tokens - 1:tokens], pages, tokens,
                           cache.page_size, spec)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            if not any(words in reason for words in REFUSALS):  # an error, and no matter of what was compiled
                raise
            self.refused[spec] = reason
            log.warning("varlen_fwd does not take %s: %s", spec, reason)
            return False
        return True

    def wants(self, q: torch.Tensor, cache: LayerCache, view: View) -> tuple[str, ...]:
        return ()

    def plan(self, view: View, name: str) -> np.ndarray:
        raise KeyError(name)

    def whole(self, bucket: Bucket, page_size: int) -> str | None:
        return None

    def prepare(self, view: View) -> None:
        """Nothing: all that a step needs was fed."""

    def attend(self, q: torch.Tensor, cache: LayerCache, view: View, spec: AttentionSpec) -> torch.Tensor:
        return (self._decode if view.decode else self._ragged)(q, cache, view, spec)

    def _decode(self, q: torch.Tensor, cache: LayerCache, view: View, spec: AttentionSpec) -> torch.Tensor:
        """Row i's query is token i. A padding row reads the first token of page 0, and its result is dropped."""
        lengths, pages, tokens = view.fed["lengths"], view.fed["pages"], len(q)
        rows = min(tokens, len(lengths))
        q, lengths, pages = q[:rows], lengths[:rows], pages[:rows]
        starts = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
        # In a graph the longest context is not known; the table's width bounds it.
        longest = pages.shape[1] * view.page_size
        out = self._call(q, cache, starts, lengths.clamp_min(1), pages, 1, longest, spec)
        out = torch.where(lengths[:, None, None] > 0, out, 0)
        return out if rows == tokens else F.pad(out, (0, 0, 0, 0, 0, tokens - rows))

    def _ragged(self, q: torch.Tensor, cache: LayerCache, view: View, spec: AttentionSpec) -> torch.Tensor:
        """Rows of any numbers of tokens; the host tells sizes, so this is never part of a graph."""
        counts = np.diff(view.host.starts)
        rows = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 0
        if not rows:
            return torch.zeros_like(q)
        used = int(view.host.starts[rows])
        out = self._call(q[:used], cache, view.fed["starts"][:rows + 1], view.fed["lengths"][:rows],
                         view.fed["pages"][:rows], int(counts.max()), int(view.host.lengths.max()), spec)
        return out if used == len(q) else F.pad(out, (0, 0, 0, 0, 0, len(q) - used))

    def _call(self, q: torch.Tensor, cache: LayerCache, starts: torch.Tensor, lengths: torch.Tensor,
              pages: torch.Tensor, most: int, longest: int, spec: AttentionSpec) -> torch.Tensor:
        """most: tokens of a row, at most. longest: context, at most."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        left, right = (-1, -1) if spec.window is None else (spec.window - 1, 0)
        self.varlen_fwd(
            q=q.contiguous(), k=cache.kv[:, 0], v=cache.kv[:, 1], out=out, cu_seqlens_q=starts,
            cu_seqlens_k=torch.zeros_like(starts), seqused_k=lengths, leftpad_k=None, block_table=pages,
            alibi_slopes=None, max_seqlen_q=most, max_seqlen_k=longest, p_dropout=0.0, q_scale=None, k_scale=None,
            v_scale=None, softmax_scale=spec.scale, softmax_sink=None, zero_tensors=False, is_causal=most > 1,
            window_size_left=left, window_size_right=right, softcap=0.0, return_softmax=False, gen=None,
            num_splits=None, mix_batch=most > 1, splits_per_seq=None, work_list=None)
        return out
