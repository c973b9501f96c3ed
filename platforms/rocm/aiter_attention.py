"""Paged attention by AITER's `unified_attention`, over the pages as they lie, where a trial let it.

Versions of it read whole pages without a mask, and give no numbers where memory beyond a context holds none. Decode
steps and others are tried each by itself; what does not pass is attended by what would have been without AITER.
"""
from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from ...core.platform import AttentionSpec, Bucket
from ..accelerator.attention import Backend, View
from ..accelerator.attention_trial import reason_against
from ..accelerator.cache import LayerCache
from ..accelerator.device import Device
from .aiter_library import Library

log = logging.getLogger(__name__)

HALVES = (torch.bfloat16, torch.float16)


class Aiter:
    """Steps of one kind or of both."""

    def __init__(self, library: Library) -> None:
        self.name, self.attention = f"AITER {library.version}", library.unified_attention

    def wants(self, q: torch.Tensor, cache: LayerCache, view: View) -> tuple[str, ...]:
        return ()

    def plan(self, view: View, name: str) -> np.ndarray:
        raise KeyError(name)

    def whole(self, bucket: Bucket, page_size: int) -> str | None:
        return None

    def prepare(self, view: View) -> None:
        """Nothing: all that a step needs was fed."""

    def attend(self, q: torch.Tensor, cache: LayerCache, view: View, spec: AttentionSpec) -> torch.Tensor:
        lengths, pages, host = view.fed["lengths"], view.fed["pages"], view.host
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        if view.decode:
            rows = used = min(len(q), len(lengths))
            longest, starts = 1, torch.arange(rows + 1, dtype=torch.int32, device=q.device)
            context = pages.shape[1] * view.page_size if view.whole else int(host.lengths.max(initial=1))
        else:
            counts, used = np.diff(host.starts), int(host.starts[-1])
            if not used:
                return out
            rows = int(np.flatnonzero(counts)[-1]) + 1  # beyond lies padding
            longest, context, starts = int(counts.max()), int(host.lengths.max()), view.fed["starts"][:rows + 1]
        window = -1 if spec.window is None else spec.window - 1  # it counts the tokens before a query
        self.attention(q=q[:used], k=cache.kv[:, 0], v=cache.kv[:, 1], out=out[:used], cu_seqlens_q=starts,
                       max_seqlen_q=longest, seqused_k=lengths[:rows], max_seqlen_k=context,
                       softmax_scale=spec.scale, causal=True, window_size=(window, 0), block_table=pages[:rows],
                       softcap=spec.softcap or 0.0, q_descale=None, k_descale=None, v_descale=None)
        if view.decode:
            out[:used].masked_fill_(lengths[:used, None, None] == 0, 0)
        return out


class ByStep:
    """Decode steps by one backend, and all others by another."""

    def __init__(self, decode: Backend, others: Backend) -> None:
        self.decode, self.others = decode, others
        self.name = f"{decode.name} in decode steps, else {others.name}"

    def of(self, view: View) -> Backend:
        return self.decode if view.decode else self.others

    def wants(self, q: torch.Tensor, cache: LayerCache, view: View) -> tuple[str, ...]:
        return self.of(view).wants(q, cache, view)

    def plan(self, view: View, name: str) -> np.ndarray:
        return self.of(view).plan(view, name)

    def whole(self, bucket: Bucket, page_size: int) -> str | None:
        return self.decode.whole(bucket, page_size)

    def prepare(self, view: View) -> None:
        self.of(view).prepare(view)

    def attend(self, q: torch.Tensor, cache: LayerCache, view: View, spec: AttentionSpec) -> torch.Tensor:
        return self.of(view).attend(q, cache, view, spec)


class AiterFirst:
    """Makes the attention of a case out of AITER's and the rest; reasons: by (spec, type, heads, page size, whether
    decode), where it is the rest's. rest: what attends the case otherwise."""

    def __init__(self, library: Library, device: Device,
                 rest: Callable[[torch.Tensor, LayerCache, AttentionSpec], Backend]) -> None:
        self.name, self.device, self.rest, self.backend = f"AITER {library.version}", device, rest, Aiter(library)
        self.reasons: dict[tuple[object, ...], str] = {}

    def __call__(self, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec) -> Backend | None:
        taken = {decode: self._takes(q, cache, spec, decode) for decode in (True, False)}
        if all(taken.values()):
            return self.backend
        if not any(taken.values()):
            return None
        rest = self.rest(q, cache, spec)
        return ByStep(*(self.backend if taken[decode] else rest for decode in (True, False)))

    def _takes(self, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec, decode: bool) -> bool:
        reason: str | None = f"queries in {q.dtype} over {cache.kv.dtype}"
        if q.dtype in HALVES and cache.kv.dtype == q.dtype:
            try:
                reason = reason_against(lambda *step: self.backend.attend(*step, spec), self.backend, q, cache, spec,
                                        decode, self.device)
            except Exception as error:  # whatever a build or a launch raises is the reason
                reason = f"{type(error).__name__}: {error}"[:300]
        if reason is None:
            return True
        self.reasons[spec, q.dtype, *q.shape[1:], cache.page_size, decode] = reason
        log.info("attention of %s is not AITER's: %s", "decode steps" if decode else "prompts", reason)
        return False
