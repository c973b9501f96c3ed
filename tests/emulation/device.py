"""torch's CPU device in the place of an accelerator: what an emulated platform takes instead of a claimed device."""
from __future__ import annotations

from collections.abc import Callable

import torch
from isthmus.core.platform import Buckets
from isthmus.platforms.accelerator.device import Device
from isthmus.platforms.accelerator.kernels import Kernels
from isthmus.platforms.host import host_memory

from .recorder import RecordedGraph

SIZES = (1, 2, 4, 8, 16, 64)
PROCESSORS = 4  # that kernels share their work among
LONG = 12       # tokens of a context from which decode rows among prompts are attended by themselves


class HostDevice(Device):
    """The CPU, with the host's memory."""

    def memory(self) -> tuple[int, int]:
        return host_memory()


class Emulated:
    """Mixed into a platform: its device is the CPU, called `arch_name`, and its graphs are recorded."""

    arch_name = "host"
    rank = 1  # before the reference, never before a platform that is what it says
    collective = "gloo"
    default_graphs = "second"  # Triton's interpreter runs on one thread at a time
    buckets = Buckets(tokens=(1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024), rows=SIZES,
                      pages=(8, 64, 256))

    def claim(self, rank: int, world: int) -> Device:
        torch.set_num_threads(1)  # tiny shapes: a second thread costs more than it gives, the more beside other tests
        return HostDevice(torch.device("cpu"), f"{self.name} emulated on the CPU", self.arch_name, PROCESSORS)

    def kernels(self, device: Device) -> Kernels:
        made = super().kernels(device)
        for backend in made.backends:
            if hasattr(backend, "long"):  # contexts of tests are short
                backend.long = LONG
        return made

    def graphs(self, device: Device) -> Callable[[], RecordedGraph]:
        return RecordedGraph
