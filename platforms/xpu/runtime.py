"""The platform of Intel GPUs, whether or not there is one here; `platform` offers it where there is."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...core.platform import Unavailable
from ..accelerator.base import AcceleratorPlatform
from ..accelerator.device import Device
from ..accelerator.graph import Graph
from .graph import graphs
from .kernels import XpuKernels, make_kernels

# First half of PCI's device number -> what compilers call the family. Source: the Linux kernel's list of Intel's GPUs.
FAMILIES = {0x0B: "pvc", 0xE2: "bmg", 0x64: "lnl", 0x56: "dg2", 0x7D: "mtl", 0xB0: "ptl"}
SWITCHES = ("on", "off")


class XpuDevice(Device):
    """An Intel GPU. Some drivers do not tell how much memory is free; then it is what this process has not taken."""

    def memory(self) -> tuple[int, int]:
        try:
            return super().memory()
        except RuntimeError:
            total = torch.xpu.get_device_properties(self.torch).total_memory
            return total, total - torch.accelerator.memory_allocated(self.torch)


class XpuPlatform(AcceleratorPlatform):
    """One rank on one Intel GPU.

    Options beside the base's: `operators` and `triton`, "on" (where installed, the default) or "off".
    """

    name = kind = "xpu"
    unusable = "Intel GPU: `sycl-ls` should list a level_zero device; update the compute runtime if it does not"
    collective = "xccl"
    options_known = (*AcceleratorPlatform.options_known, "operators", "triton")

    def device(self, rank: int) -> Device:
        facts = torch.xpu.get_device_properties(rank)
        family = family_of(getattr(facts, "device_id", 0))
        cores = getattr(facts, "gpu_subslice_count", 0) or facts.max_compute_units
        return XpuDevice(torch.device("xpu", rank), facts.name, family, cores,
                         details={"architecture": family, "driver": facts.driver_version})

    def supports(self, op: str, **case: Any) -> str | None:
        if op == "expert_parallel":
            return "its routing operators are given all experts"
        return super().supports(op, **case)

    def kernels(self, device: Device) -> XpuKernels:
        made = self.choose(device)
        self.kv_dtypes = (*AcceleratorPlatform.kv_dtypes, *made.narrow_kv)
        return made

    def choose(self, device: Device) -> XpuKernels:
        """What is installed and wanted."""
        return make_kernels(device, **self.switches())

    def switches(self) -> dict[str, bool]:
        """Which of the parts that may be installed are wanted. Raises `Unavailable` for another word than on, off."""
        for name in ("operators", "triton"):
            if self.options.get(name, SWITCHES[0]) not in SWITCHES:
                raise Unavailable(f"{name}={self.options[name]!r}: one of {', '.join(SWITCHES)} is needed")
        return {name: self.options.get(name) != "off" for name in ("operators", "triton")}

    def graphs(self, device: Device) -> Callable[[], Graph] | str:
        return graphs(device)


def family_of(device_id: int) -> str:
    """"pvc", "bmg" ... by PCI's device number, "xe" for one that is not known."""
    return FAMILIES.get(device_id >> 8, "xe")
