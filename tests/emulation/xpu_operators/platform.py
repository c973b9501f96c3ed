"""The xpu platform with reference kernels for vllm-xpu-kernels' operators, and no Triton; recorded graphs."""
from __future__ import annotations

from isthmus.platforms.accelerator.device import Device
from isthmus.platforms.accelerator.kernels import Kernels
from isthmus.platforms.xpu.kernels import XpuKernels
from isthmus.platforms.xpu.operators import matching
from isthmus.platforms.xpu.runtime import XpuPlatform

from ..device import Emulated
from .reference import register


class Platform(Emulated, XpuPlatform):
    __doc__ = XpuPlatform.__doc__
    interface_version = 1
    name = "xpu_operators_emulated"
    arch_name = "bmg"
    page_sizes = (16, 32, 64, 128)  # the operators' alone, so that the laws about models call them

    def choose(self, device: Device) -> XpuKernels:
        register()
        return XpuKernels(device, Kernels(device), matching()[0], "reference kernels")
