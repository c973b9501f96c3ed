"""The xpu platform as on a Max 1550 with few Xe cores: Triton's kernels in the interpreter, recorded graphs."""
from __future__ import annotations

from ..interpreter import interpret

interpret()  # before a kernel is defined

from isthmus.platforms.accelerator.device import Device  # noqa: E402
from isthmus.platforms.xpu.kernels import XpuKernels, triton_kernels  # noqa: E402
from isthmus.platforms.xpu.runtime import XpuPlatform  # noqa: E402

from ..device import Emulated  # noqa: E402


class Platform(Emulated, XpuPlatform):
    __doc__ = XpuPlatform.__doc__
    interface_version = 1
    name = "xpu_emulated"
    arch_name = "pvc"

    def choose(self, device: Device) -> XpuKernels:
        return XpuKernels(device, triton_kernels(device), {}, "not in this emulation")
