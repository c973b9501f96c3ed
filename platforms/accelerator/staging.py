"""A step's integers on their way to the device: packed into one buffer of the host, moved by one copy.

The host's buffers form a ring, so that a step can be packed while the copies of the steps before it are still under
way. A device buffer is fresh for each step, or the same for each replay of a graph.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from .device import Device

RING = 4      # host buffers: more than the steps that are launched ahead of their collection
ALIGN = 64    # bytes
DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32, np.dtype(np.uint32): torch.int32,
          np.dtype(np.uint8): torch.uint8}


class Part(NamedTuple):
    """Where an array lies in the buffer."""

    start: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def layout(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, Part], int]:
    """The place of each array, and the bytes of all."""
    parts, end = {}, 0
    for name, array in arrays.items():
        parts[name] = Part(end, array.nbytes, array.shape, DTYPES[array.dtype])
        end += -(-array.nbytes // ALIGN) * ALIGN
    return parts, end


class Staging:
    """Packs arrays of int32, float32, uint32 (as int32) and uint8, and moves them to the device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.ring = [(device.host_buffer(0), device.event()) for _ in range(RING)]
        self.turn = 0

    def feed(self, arrays: Mapping[str, np.ndarray], into: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The arrays on the device, in a fresh buffer or `into` one of the right size. Does not wait for the copy."""
        parts, nbytes = layout(arrays)
        host = self._next(nbytes)
        flat = host.numpy()
        for name, part in parts.items():
            flat[part.start:part.start + part.nbytes] = np.ascontiguousarray(arrays[name]).view(np.uint8).reshape(-1)
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device.torch) if into is None else into
        buffer.copy_(host[:nbytes], non_blocking=True)
        self.ring[self.turn][1].record()
        return views(buffer, parts)

    def _next(self, nbytes: int) -> torch.Tensor:
        """A host buffer that no copy reads any more."""
        self.turn = (self.turn + 1) % RING
        host, event = self.ring[self.turn]
        event.synchronize()
        if len(host) < nbytes:
            host = self.device.host_buffer(max(nbytes, 2 * len(host)))
            self.ring[self.turn] = host, event
        return host


def views(buffer: torch.Tensor, parts: Mapping[str, Part]) -> dict[str, torch.Tensor]:
    """The arrays inside a device buffer."""
    return {name: buffer[part.start:part.start + part.nbytes].view(part.dtype).view(part.shape)
            for name, part in parts.items()}
