"""The platform of AMD GPUs, whether or not there is one here; `platform` offers it where there is.

torch calls AMD's GPUs by CUDA's names, so the body is cuda's; what differs is how the device is called, and its units.
"""
from __future__ import annotations

import torch

from ..accelerator.base import AcceleratorPlatform
from ..accelerator.device import Device
from ..accelerator.kernels import Kernels
from ..cuda.runtime import CudaPlatform
from .kernels import make_kernels


class RocmPlatform(CudaPlatform):
    """One rank on one AMD GPU (CDNA 2 or later, RDNA 3 or later)."""

    name = "rocm"
    unusable = "AMD GPU: look at `rocminfo`, and whether HIP_VISIBLE_DEVICES hides it"
    options_known = (*AcceleratorPlatform.options_known, "activations", "aiter")

    def check(self, capability: tuple[int, int]) -> None:
        """torch was built for the architectures that it lists; all of those compute in bf16."""

    def arch(self, facts: object) -> str:
        return facts.gcnArchName.partition(":")[0]

    def facts(self, facts: object) -> dict[str, str]:
        return {"architecture": self.arch(facts), "HIP": str(torch.version.hip),
                "lanes of a wave": str(getattr(facts, "warp_size", "unknown"))}

    def kernels(self, device: Device) -> Kernels:
        return make_kernels(device, self.narrow(), self.options.get("aiter", "auto"), self.buckets.tokens,
                            lambda: self.graphs_wanted(device))
