"""The platform of NVIDIA GPUs, whether or not there is one here; `platform` offers it where there is.

torch calls AMD's GPUs by the same names, so `rocm` derives from this.
"""
from __future__ import annotations

from collections.abc import Callable

import torch

from ...core.platform import Unavailable
from ..accelerator.base import AcceleratorPlatform
from ..accelerator.device import Device
from ..accelerator.graph import Graph
from ..accelerator.kernels import Kernels
from .graph import cuda_graphs
from .kernels import make_kernels

ACTIVATIONS = {"declared": None, "8bit": True, "16bit": False}
OLDEST = (8, 0)  # Ampere: bf16 matrix units


class CudaPlatform(AcceleratorPlatform):
    """One rank on one NVIDIA GPU of compute capability 8.0 or later."""

    name = kind = "cuda"
    unusable = "GPU: compare the driver's CUDA version in `nvidia-smi` with torch.version.cuda"
    options_known = (*AcceleratorPlatform.options_known, "activations", "flashinfer")
    kv_dtypes = ("bf16", "f16", "f32", "f8_e4m3", "f8_e5m2", "i8")

    def device(self, rank: int) -> Device:
        self.check(torch.cuda.get_device_capability(rank))
        facts = torch.cuda.get_device_properties(rank)
        return Device(torch.device("cuda", rank), facts.name, self.arch(facts), facts.multi_processor_count,
                      details=self.facts(facts))

    def check(self, capability: tuple[int, int]) -> None:
        if capability < OLDEST:
            raise Unavailable(f"compute capability {capability[0]}.{capability[1]}: 8.0 (Ampere) or later is needed")

    def arch(self, facts: object) -> str:
        return f"sm_{facts.major}{facts.minor}"

    def facts(self, facts: object) -> dict[str, str]:
        return {"architecture": self.arch(facts), "CUDA": str(torch.version.cuda)}

    def graphs(self, device: Device) -> Callable[[], Graph] | str:
        return cuda_graphs(device)

    def kernels(self, device: Device) -> Kernels:
        return make_kernels(device, self.narrow(), self.options.get("flashinfer", "auto"), self.buckets.tokens,
                            lambda: self.graphs_wanted(device))

    def graphs_wanted(self, device: Device) -> Callable[[], Graph] | str:
        return "turned off by an option" if self.options.get("graphs") == "off" else self.graphs(device)

    def narrow(self) -> bool | None:
        """Whether activations of 8-bit weights are quantized, None = as the checkpoint was made for. Raises
        `Unavailable` for another word."""
        word = self.options.get("activations", "declared")
        if word not in ACTIVATIONS:
            raise Unavailable(f"activations={word!r}: one of {', '.join(ACTIVATIONS)} is needed")
        return ACTIVATIONS[word]
