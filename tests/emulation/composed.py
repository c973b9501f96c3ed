"""The accelerator base on torch's CPU device, with the composed paths: what every accelerator platform starts from."""
from __future__ import annotations

import torch
from isthmus.core.platform import Buckets
from isthmus.platforms.accelerator.base import AcceleratorPlatform
from isthmus.platforms.accelerator.device import Device
from isthmus.platforms.host import host_memory

from .recorder import RecordedGraph

SIZES = (1, 2, 4, 8, 16, 64)


class HostDevice(Device):
    """The CPU, with the host's memory."""

    def memory(self) -> tuple[int, int]:
        return host_memory()


class Emulated:
    """Mixed into a platform: its device is the CPU, its graphs are recorded."""

    buckets = Buckets(tokens=(*SIZES, 256, 1024), rows=SIZES, pages=(8, 64, 1024, 16384))

    def claim(self, rank: int, world: int) -> Device:
        torch.set_num_threads(1)  # tiny shapes: a second thread costs more than it gives, the more beside other tests
        return HostDevice(torch.device("cpu"), f"{self.name} emulated on the CPU", "host", 4)

    def graphs(self, device: Device):
        return RecordedGraph


class ComposedPlatform(Emulated, AcceleratorPlatform):
    """The base alone."""

    name = "composed"
