"""A stand-in for the module `flashinfer`: its paged attention wrappers on the CPU, by the signatures of the real ones.

Every call is bound to the signatures recorded in ci/flashinfer_signatures.json, and the checks that the real wrappers
make are made. What a run reads when it is replayed from a graph are the buffers that it was captured with; what `plan`
gave as numbers stays that of the capture, as with the real kernels.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from isthmus.platforms.triton_kit.launch import launch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .products import products

CALLS: Counter[str] = Counter()


def check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def library(bind: Mapping[str, Callable[..., object]], version: str,
            faults: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] | None = None) -> Any:
    """bind: what raises `TypeError` for a call that the method of this name ("Wrapper.method") does not take. faults:
    see `products`."""
    def bound(kind: type) -> type:
        for name in ("__init__", "plan", "run"):
            setattr(kind, name, _bound(f"{kind.__name__}.{name}", getattr(kind, name)))
        return kind

    def _bound(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        whole = name.replace(".plan", "._plan_impl")

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            for each in dict.fromkeys((name, whole)):
                if each in bind:
                    bind[each](*args, **kwargs)
            CALLS[name] += 1
            return method(*args, **kwargs)
        return call

    class BatchDecodeWithPagedKVCacheWrapper(Decode):
        pass

    class BatchPrefillWithPagedKVCacheWrapper(Prefill):
        pass

    kinds = BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
    return SimpleNamespace(__version__=version, **vars(products(bind, faults)),
                           **{kind.__name__: bound(kind) for kind in kinds})


class Wrapper:
    """What both have in common: buffers on the device, and the numbers of the last plan."""

    def _buffers(self, fixed: bool, *buffers: torch.Tensor | None) -> None:
        check(not fixed or all(isinstance(part, torch.Tensor) for part in buffers), "buffers in graph mode")
        self.fixed, self.buffers, self.numbers = fixed, buffers, None

    def _store(self, *values: torch.Tensor) -> None:
        """A graph's buffers keep their place; others are new with every plan."""
        check(_get_current_dispatch_mode() is None, "plan() cannot be captured")
        for value in values:
            check(value.dtype == torch.int32 and value.is_contiguous(), f"plan: {value.dtype}")
        if not self.fixed:
            self.buffers = tuple(value.clone() for value in values)
            return
        for buffer, value in zip(self.buffers, values, strict=True):
            check(len(value) <= len(buffer), "the size of indices should be at most that of the allocated buffer")
            buffer[:len(value)].copy_(value)

    def _plan(self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, heads: int, kv_heads: int,
              dim: int, page_size: int, **more: Any) -> None:
        check(heads % kv_heads == 0 and more["pos_encoding_mode"] == "NONE", "heads, or positions")
        check(len(indptr) == len(last) + 1 and int(indptr[0]) == 0, "indptr")
        check(int(indptr[-1]) == len(indices) and bool((indptr.diff() > 0).all()), "pages of each row")
        check(bool(((last >= 1) & (last <= page_size)).all()), "last_page_len")
        scale = dim ** -0.5 if more["sm_scale"] is None else more["sm_scale"]
        self.numbers = SimpleNamespace(
            heads=heads, kv_heads=kv_heads, dim=dim, page_size=page_size, scale=scale, window=more["window_left"],
            cap=more["logits_soft_cap"] or 0.0, dtype=more["q_data_type"], kv_dtype=more["kv_data_type"])

    def _run(self, q: torch.Tensor, cache: torch.Tensor, k_scale: float | None, v_scale: float | None) -> torch.Tensor:
        plan = self.numbers
        check(plan is not None, "run() before plan()")
        check(q.dtype == plan.dtype and cache.dtype == plan.kv_dtype, "The dtype of q or k does not match the plan's")
        check(tuple(q.shape[1:]) == (plan.heads, plan.dim) and q.stride(-1) == 1, "q")
        check(tuple(cache.shape[1:]) == (2, plan.page_size, plan.kv_heads, plan.dim), "paged_kv_cache in NHD")
        out = torch.empty_like(q)
        launch(KERNEL, (1,), plan, q, cache, out, *self.buffers, k_scale=k_scale or 1.0, v_scale=v_scale or 1.0)
        return out


class Decode(Wrapper):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
                 use_tensor_cores: bool = False, paged_kv_indptr_buffer: torch.Tensor | None = None,
                 paged_kv_indices_buffer: torch.Tensor | None = None,
                 paged_kv_last_page_len_buffer: torch.Tensor | None = None) -> None:
        check(float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD", "workspace or layout")
        self.tensor_cores = use_tensor_cores
        self._buffers(use_cuda_graph, paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)

    def plan(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
             num_kv_heads: int, head_dim: int, page_size: int, **more: Any) -> None:
        group = num_qo_heads // num_kv_heads
        check(self.tensor_cores or group in (1, 2, 3, 4, 6, 8, 16), f"Unsupported group_size: {group}")
        check(not self.fixed or len(last_page_len) == len(self.buffers[2]), "The batch size should be fixed")
        self._store(indptr, indices, last_page_len)
        self._plan(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **more)

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor, k_scale: float | None = None,
            v_scale: float | None = None) -> torch.Tensor:
        check(len(q) == len(self.buffers[2]), "q implies another q_len_per_req than was planned")
        return self._run(q, paged_kv_cache, k_scale, v_scale)


class Prefill(Wrapper):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        check(float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD", "workspace or layout")
        self._buffers(False)

    def plan(self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
             paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
             page_size: int, causal: bool = False, **more: Any) -> None:
        check(causal, "a prefill that is not causal")
        self.tokens = int(qo_indptr[-1])
        self._store(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, qo_indptr)
        self._plan(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk,
                   page_size, **more)

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor, k_scale: float | None = None,
            v_scale: float | None = None) -> torch.Tensor:
        check(len(q) == self.tokens, f"q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({self.tokens})")
        check(_get_current_dispatch_mode() is None, "a prefill's wrapper has no buffers for a graph")
        return self._run(q, paged_kv_cache, k_scale, v_scale)


class Kernel:
    """Started as a Triton kernel is, so that a recorder can have it replayed."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return attend


KERNEL = Kernel()


def attend(plan: Any, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, indptr: torch.Tensor,
           indices: torch.Tensor, last: torch.Tensor, starts: torch.Tensor | None = None, *, k_scale: float,
           v_scale: float) -> None:
    """Row by row in float32; a query at position p sees keys from p - window on, both included, as FlashInfer says."""
    starts = torch.arange(len(last) + 1) if starts is None else starts
    for row in range(len(last)):
        pages = indices[indptr[row]:indptr[row + 1]].long()
        length = (len(pages) - 1) * plan.page_size + int(last[row])
        some = q[starts[row]:starts[row + 1]].float()
        k, v = (part.flatten(0, 1)[:length].float().repeat_interleave(plan.heads // plan.kv_heads, 1)
                for part in cache[pages].unbind(1))
        scores = torch.einsum("qhd,khd->hqk", some, k) * plan.scale * k_scale
        if plan.cap > 0:
            scores = plan.cap * torch.tanh(scores / plan.cap)
        at = torch.arange(length - len(some), length)[:, None]
        keys = torch.arange(length)
        seen = (keys <= at) & ((keys >= at - plan.window) | (plan.window < 0))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[starts[row]:starts[row + 1]] = (torch.einsum("hqk,khd->qhd", weights, v) * v_scale).to(out.dtype)
