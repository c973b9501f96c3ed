"""One device of torch's, seen through `torch.accelerator`: what the accelerator platforms have in common.

The CPU counts as a device here too. It has no streams and cannot pin memory; the platforms' tests run on it.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


class Done:
    """An event of a device that finishes everything at once."""

    def record(self) -> None:
        """Nothing is left to wait for."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


@dataclass(frozen=True)
class Device:
    """A claimed device. arch: as compilers call it ("sm_90", "gfx942"). processors: multiprocessors or compute units.

    host: whether it is the host's own processor.
    """

    torch: torch.device
    name: str = ""
    arch: str = ""
    processors: int = 1
    details: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def host(self) -> bool:
        return self.torch.type == "cpu"

    @property
    def module(self) -> Any:
        """torch's own of this kind of device: `torch.cuda` and the like."""
        return torch.get_device_module(self.torch)

    def enter(self) -> None:
        """Make it this thread's device, as a new thread has to."""
        if not self.host:
            self.module.set_device(self.torch)

    def event(self) -> torch.Event | Done:
        return Done() if self.host else torch.Event(self.torch)

    def memory(self) -> tuple[int, int]:
        """Bytes on the device: total, and free, with what torch's allocator keeps for later among the free ones."""
        figures = torch.accelerator if hasattr(torch.accelerator, "get_memory_info") else None
        free, total = figures.get_memory_info(self.torch) if figures else self.module.mem_get_info(self.torch)
        kept = self.module.memory_reserved(self.torch) - self.module.memory_allocated(self.torch)
        return total, free + kept

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """uint8 memory of the host that the device copies from and to while the host goes on."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=not self.host)

    def wait(self) -> None:
        """Until all that was launched is done."""
        if not self.host:
            torch.accelerator.synchronize(self.torch)

    def give_back(self) -> None:
        """Memory that torch's allocator keeps and nobody uses."""
        if not self.host:
            torch.accelerator.empty_cache()
