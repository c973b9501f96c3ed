"""The platform of Ascend NPUs, whether or not there is one here; `platform` offers it where there is."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch

from ...core.platform import Manifest, Unavailable
from ..accelerator.base import AcceleratorPlatform
from ..accelerator.device import Device
from ..accelerator.graph import Graph
from ..accelerator.kernels import Kernels
from .graph import npu_graphs
from .kernels import NpuKernels
from .quant import NZ, Policy

# Names of NPUs whose operators this platform calls: Atlas A2, Atlas A3 and Ascend 950.
SERVED = ("Ascend910B", "Ascend910_9", "Ascend950")
CHOICES = {"activations": ("16bit", "8bit"), "nz": NZ}


@dataclass(frozen=True)
class NpuDevice(Device):
    """A claimed NPU, through torch.npu where torch_npu does not stand behind `torch.accelerator` in all versions."""

    def event(self) -> Any:
        return torch.npu.Event()

    def memory(self) -> tuple[int, int]:
        free, total = torch.npu.mem_get_info(self.torch)
        return total, free + torch.npu.memory_reserved(self.torch) - torch.npu.memory_allocated(self.torch)

    def wait(self) -> None:
        torch.npu.synchronize(self.torch)

    def give_back(self) -> None:
        torch.npu.empty_cache()


class NpuPlatform(AcceleratorPlatform):
    """One rank on one Ascend NPU. Options: `graphs` as for all accelerators; `activations`: "16bit" or "8bit", which
    quantizes those of int8 weights per token; `nz`: which matrices lie in the NPU's own order of 16 x 16 blocks, those
    of "quantized" products and experts, "all" or "off"."""

    name = kind = "npu"
    noun = "NPU"
    unusable = ("NPU: look at `npu-smi info`, and whether another process holds it or ASCEND_RT_VISIBLE_DEVICES hides "
                "it")
    collective = "hccl"
    options_known = (*AcceleratorPlatform.options_known, *CHOICES)
    page_sizes = (128, 64, 32, 16)

    def probe(self, rank: int = 0, world: int = 1) -> Manifest:
        for name, known in CHOICES.items():
            if self.options.get(name, known[0]) not in known:
                raise Unavailable(f"{name}={self.options[name]!r}: one of {', '.join(known)} is needed")
        return super().probe(rank, world)

    def claim(self, rank: int, world: int) -> Device:
        try:
            import_module("torch_npu")  # which makes torch.npu
        except (ImportError, OSError) as error:
            raise Unavailable(f"torch_npu cannot be loaded ({error}): source CANN's set_env.sh; its release notes say "
                              "which CANN it needs") from error
        return super().claim(rank, world)

    def device(self, rank: int) -> Device:
        name = torch.npu.get_device_name(rank)
        self.check(name)
        torch.npu.config.allow_internal_format = True  # else format casts give ND
        return NpuDevice(torch.device("npu", rank), name, name, details={"torch_npu": version("torch-npu")})

    def check(self, name: str) -> None:
        if not name.startswith(SERVED):
            raise Unavailable(f"{name}: Atlas A2 (Ascend 910B) or later is needed, whose attention operators read K "
                              "and V in pages")

    def graphs(self, device: Device) -> Callable[[], Graph] | str:
        return npu_graphs()

    def supports(self, op: str, **case: Any) -> str | None:
        if op == "expert_parallel":
            return "its routing operators are given all experts"
        return super().supports(op, **case)

    def kernels(self, device: Device) -> Kernels:
        return NpuKernels(device, Policy(self.options.get("activations") == "8bit", self.options.get("nz", NZ[0])))
