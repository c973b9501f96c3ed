"""K and V of every layer, and the last sampled token of each sequence slot: the memory that steps change in place."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...core.platform import StateSpec
from .device import Device

KV_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f8_e4m3": torch.float8_e4m3fn,
             "f8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class State:
    """caches: of each layer [pages, 2, page_size, kv_heads, head_dim], K at [:, 0] and V at [:, 1], the layout that
    FlashInfer calls NHD. last: int32 [seqs]."""

    spec: StateSpec
    caches: tuple[torch.Tensor, ...]
    last: torch.Tensor

    @classmethod
    def allocate(cls, spec: StateSpec, pages: int, device: Device) -> State:
        caches = tuple(torch.zeros((pages, 2, spec.page_size, layer.kv_heads, layer.head_dim),
                                   dtype=KV_DTYPES[spec.dtype], device=device.torch) for layer in spec.layers)
        return cls(spec, caches, torch.zeros(spec.seqs, dtype=torch.int32, device=device.torch))

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        source, target = (torch.tensor(list(part), device=self.last.device) for part in (src, dst))
        for cache in self._bytes():
            cache.index_copy_(0, target, cache.index_select(0, source))

    def export_pages(self, pages: Sequence[int]) -> bytes:
        """Layer after layer, each as [pages, 2, page_size, kv_heads, head_dim]."""
        wanted = torch.tensor(list(pages), device=self.last.device)
        return b"".join(cache.index_select(0, wanted).cpu().numpy().tobytes() for cache in self._bytes())

    def import_pages(self, pages: Sequence[int], data: bytes) -> None:
        wanted, start = torch.tensor(list(pages), device=self.last.device), 0
        for cache in self._bytes():
            size = len(pages) * cache.shape[1]
            part = torch.from_numpy(np.frombuffer(data, np.uint8, size, start).copy())
            cache.index_copy_(0, wanted, part.view(len(pages), -1).to(cache.device))
            start += size

    def _bytes(self) -> list[torch.Tensor]:
        """Each layer's memory as [pages, bytes]."""
        return [cache.flatten(1).view(torch.uint8) for cache in self.caches]
