"""The rocm platform on torch's CPU device, its Triton kernels in the interpreter and its graphs recorded."""
from __future__ import annotations

import torch
from isthmus.platforms.accelerator.device import Device
from isthmus.platforms.rocm.runtime import RocmPlatform

from .composed import Emulated, HostDevice


class EmulatedRocm(Emulated, RocmPlatform):
    """As an MI300X with four compute units."""

    arch_name = "gfx942"

    def claim(self, rank: int, world: int) -> Device:
        torch.set_num_threads(1)
        return HostDevice(torch.device("cpu"), "AMD GPU emulated on the CPU", self.arch_name, 4)
