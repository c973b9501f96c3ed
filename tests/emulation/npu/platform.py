"""The npu platform as on an Atlas A2: torch_npu's operators as the CPU computes them, recorded graphs."""
from __future__ import annotations

from isthmus.platforms.npu.runtime import NpuPlatform

from ..device import Emulated
from .operators import register

register()


class Platform(Emulated, NpuPlatform):
    __doc__ = NpuPlatform.__doc__
    interface_version = 1
    name = "npu_emulated"
    default_graphs = "first"
    arch_name = "Ascend910B3"
