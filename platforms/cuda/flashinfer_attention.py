"""Paged attention by FlashInfer's wrappers, over the pages as they lie (its layout NHD).

Its kernels follow a plan that the host makes for each step from the rows' lengths and copies into buffers of the
wrapper. Every thread has its own wrappers for steps that are launched eagerly, since graphs are captured beside them;
every captured decode step has one more, with buffers of fixed size, which is planned anew before each replay.
"""
from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.nn import functional as F

from ...core.platform import AttentionSpec, Batch, Bucket
from ..accelerator.attention import View
from ..accelerator.attention_trial import reason_against
from ..accelerator.cache import LayerCache
from ..accelerator.device import Device
from .flashinfer_library import Case, Limits

log = logging.getLogger(__name__)

EAGER_SCRATCH = 384 << 20  # bytes for the parts of split contexts: a prefill of 128 heads needs most of it
GRAPH_SCRATCH = 128 << 20  # of decode steps; FlashInfer's documentation recommends so much


def sight(view: View, rows: int, window: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the first rows: the first page that a token of this step sees, the number of pages from there on, and how
    many tokens the last one holds. A padding row sees one token of page 0, since a row of none has no last page."""
    lengths = np.maximum(view.host.lengths[:rows], 1)
    counts = np.maximum(np.diff(view.host.starts)[:rows], 1)
    first = np.zeros_like(lengths)
    if window is not None:
        first = np.maximum(lengths - counts - window + 1, 0) // view.page_size
    pages = -(-lengths // view.page_size)
    return first, pages - first, lengths - (pages - 1) * view.page_size


class Scratch:
    """Memory for the parts of split contexts: one piece for each thread's eager steps, one for all graphs, which are
    replayed one after the other."""

    def __init__(self, device: Device) -> None:
        self.device, self._local, self._graph = device, threading.local(), None

    def eager(self) -> torch.Tensor:
        if not hasattr(self._local, "memory"):
            self._local.memory = self._zeros(EAGER_SCRATCH)
        return self._local.memory

    def graph(self) -> torch.Tensor:
        if self._graph is None:
            self._graph = self._zeros(GRAPH_SCRATCH)
        return self._graph

    def _zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device.torch)


class Planned:
    """A wrapper, and the batch that it was planned for."""

    def __init__(self, wrapper: Any, device: Device) -> None:
        self.wrapper, self.event = wrapper, device.event()
        self.batch: Batch | None = None

    def plan(self, batch: Batch, **arguments: object) -> None:
        self.event.synchronize()  # `plan` copies from one pinned buffer, which an earlier copy may not have read yet
        self.wrapper.plan(**arguments)
        self.event.record()
        self.batch = batch


class FlashInfer:
    """One case's attention."""

    def __init__(self, library: ModuleType, device: Device, case: Case, scratch: Scratch) -> None:
        self.name = f"FlashInfer {library.__version__}"
        self.library, self.device, self.case, self.scratch = library, device, case, scratch
        self.pages = f"flashinfer.pages.{case.spec.window}"
        self.local = threading.local()
        self.graphs: WeakKeyDictionary[View, Planned] = WeakKeyDictionary()

    def wants(self, q: torch.Tensor, cache: LayerCache, view: View) -> tuple[str, ...]:
        return (self.pages,)

    def plan(self, view: View, name: str) -> np.ndarray:
        """Pages in sight, row after row without gaps: [rows * pages], zeros behind."""
        table = view.host.pages
        first, count, _ = sight(view, len(table), self.case.spec.window)
        places = np.arange(table.shape[1]) - first[:, None]
        found = table[(places >= 0) & (places < count[:, None])]
        return np.pad(found, (0, table.size - len(found)))

    def whole(self, bucket: Bucket, page_size: int) -> str | None:
        return None

    def prepare(self, view: View) -> None:
        rows = min(len(view.host.tokens), len(view.host.lengths))
        if view not in self.graphs:
            self.graphs[view] = Planned(self._fixed(rows, view.host.pages.shape[1]), self.device)
        self._plan(self.graphs[view], view, rows)

    def attend(self, q: torch.Tensor, cache: LayerCache, view: View, spec: AttentionSpec) -> torch.Tensor:
        if view.decode:
            rows = min(len(q), len(view.host.lengths))
            planned = self.graphs[view] if view.whole else self._ready(view, rows)
            out = planned.wrapper.run(q=q[:rows].contiguous(), paged_kv_cache=cache.kv, **scales(cache))
            out = torch.where(view.fed["lengths"][:rows, None, None] > 0, out, 0)
            return padded(out, len(q))
        used = int(view.host.starts[-1])
        if not used:
            return torch.zeros_like(q)
        rows = int(np.flatnonzero(np.diff(view.host.starts))[-1]) + 1  # beyond lies padding
        wrapper = self._ready(view, rows).wrapper
        return padded(wrapper.run(q=q[:used].contiguous(), paged_kv_cache=cache.kv, **scales(cache)), len(q))

    def _ready(self, view: View, rows: int) -> Planned:
        """This thread's own, planned for this step by the first layer that comes."""
        kept: dict[bool, Planned] = vars(self.local).setdefault("kept", {})
        if view.decode not in kept:
            kept[view.decode] = Planned(self._decode_wrapper() if view.decode else self._prefill_wrapper(), self.device)
        if kept[view.decode].batch is not view.host:
            self._plan(kept[view.decode], view, rows)
        return kept[view.decode]

    def _plan(self, planned: Planned, view: View, rows: int) -> None:
        _, count, last = sight(view, rows, self.case.spec.window)
        indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(count)]).astype(np.int32))
        indices, last = view.fed[self.pages][:int(indptr[-1])], torch.from_numpy(last.astype(np.int32))
        case = self.case
        if view.decode:
            planned.plan(view.host, indptr=indptr, indices=indices, last_page_len=last, head_dim=case.head_dim,
                         **case.arguments())
        else:
            starts = torch.from_numpy(view.host.starts[:rows + 1].astype(np.int32))
            planned.plan(view.host, qo_indptr=starts, paged_kv_indptr=indptr, paged_kv_indices=indices,
                         paged_kv_last_page_len=last, head_dim_qk=case.head_dim, causal=True, **case.arguments())

    def _prefill_wrapper(self) -> Any:
        return self.library.BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer=self.scratch.eager(), kv_layout="NHD")

    def _decode_wrapper(self) -> Any:
        return self.library.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=self.scratch.eager(), kv_layout="NHD", use_tensor_cores=self.case.tensor_cores)

    def _fixed(self, rows: int, pages: int) -> Any:
        """For a graph: of so many rows, with that many pages each at most."""
        buffers = {name: torch.zeros(size, dtype=torch.int32, device=self.device.torch) for name, size in (
            ("paged_kv_indptr_buffer", rows + 1), ("paged_kv_indices_buffer", rows * pages),
            ("paged_kv_last_page_len_buffer", rows))}
        return self.library.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=self.scratch.graph(), kv_layout="NHD", use_cuda_graph=True,
            use_tensor_cores=self.case.tensor_cores, **buffers)


def scales(cache: LayerCache) -> dict[str, float]:
    """Of both wrappers' `run`, where there are any."""
    plain = cache.k_scale == cache.v_scale == 1
    return {} if plain else {"k_scale": cache.k_scale, "v_scale": cache.v_scale}


def padded(out: torch.Tensor, tokens: int) -> torch.Tensor:
    """With zeros for the tokens that are nobody's."""
    return out if len(out) == tokens else F.pad(out, (0, 0, 0, 0, 0, tokens - len(out)))


class FlashInferFirst:
    """Makes the attention of a case, or says why it does not: `reasons` by case."""

    def __init__(self, library: ModuleType, device: Device, limits: Limits | None = None,
                 within: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """within: what a trial is made within."""
        self.name = f"FlashInfer {library.__version__}"
        self.library, self.device, self.limits, self.within = library, device, limits or Limits(), within
        self.scratch = Scratch(device)
        self.reasons: dict[Case, str] = {}

    def __call__(self, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec) -> FlashInfer | None:
        case = Case.of(q, cache, spec)
        reason = self.limits.reason_against(case)
        if reason is None:
            backend = FlashInfer(self.library, self.device, case, self.scratch)
            reason = self._try(backend, q, cache)
            if reason is None:
                return backend
        self.reasons[case] = reason
        log.info("attention is not FlashInfer's: %s", reason)
        return None

    def _try(self, backend: FlashInfer, q: torch.Tensor, cache: LayerCache) -> str | None:
        """A decode step and a mixed one beside the composed path. This builds the kernels too, where they do not come
        built, so that a compiler which is missing, or an architecture, tells before a request depends on it."""
        spec = backend.case.spec
        try:
            with self.within():
                for decode in (True, False):
                    reason = reason_against(lambda *step: backend.attend(*step, spec), backend, q, cache, spec, decode,
                                            self.device)
                    if reason is not None:
                        return f"{'decode' if decode else 'prefill'}: {reason}"
        except Exception as error:  # whatever a build or a launch raises is the reason
            return f"{type(error).__name__}: {error}"[:300]
        return None
