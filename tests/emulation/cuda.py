"""The cuda platform on torch's CPU device, its Triton kernels in the interpreter and its graphs recorded."""
from __future__ import annotations

import torch
from isthmus.platforms.accelerator.device import Device
from isthmus.platforms.cuda.runtime import CudaPlatform

from .composed import Emulated, HostDevice


class EmulatedCuda(Emulated, CudaPlatform):
    """As an H100 with four multiprocessors."""

    arch_name = "sm_90"

    def claim(self, rank: int, world: int) -> Device:
        torch.set_num_threads(1)
        return HostDevice(torch.device("cpu"), "NVIDIA GPU emulated on the CPU", self.arch_name, 4)
