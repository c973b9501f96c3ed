"""K and V of every layer, and the last sampled token of each sequence slot: the memory that steps change in place."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...core.platform import StateSpec
from .cache import LayerCache
from .device import Device


@dataclass(frozen=True)
class State:
    """caches: of each layer. last: int32 [seqs]."""

    spec: StateSpec
    caches: tuple[LayerCache, ...]
    last: torch.Tensor

    @classmethod
    def allocate(cls, spec: StateSpec, pages: int, device: Device) -> State:
        caches = tuple(LayerCache.allocate(spec, layer, pages, device) for layer in spec.layers)
        return cls(spec, caches, torch.zeros(spec.seqs, dtype=torch.int32, device=device.torch))

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        source, target = (torch.tensor(list(part), device=self.last.device) for part in (src, dst))
        for part in self._bytes():
            part.index_copy_(0, target, part.index_select(0, source))

    def export_pages(self, pages: Sequence[int]) -> bytes:
        """Layer after layer, each as `LayerCache.parts`."""
        wanted = torch.tensor(list(pages), device=self.last.device)
        return b"".join(part.index_select(0, wanted).cpu().numpy().tobytes() for part in self._bytes())

    def import_pages(self, pages: Sequence[int], data: bytes) -> None:
        wanted, start = torch.tensor(list(pages), device=self.last.device), 0
        for part in self._bytes():
            size = len(pages) * part.shape[1]
            given = torch.from_numpy(np.frombuffer(data, np.uint8, size, start).copy())
            part.index_copy_(0, wanted, given.view(len(pages), -1).to(part.device))
            start += size

    def _bytes(self) -> list[torch.Tensor]:
        """All memory, each part as [pages, bytes]."""
        return [part.flatten(1).view(torch.uint8) for cache in self.caches for part in cache.parts]
