"""The cuda platform with FlashInfer's attention, as its stand-in computes it, over the paths of torch's operators."""
from __future__ import annotations

import torch
from isthmus.platforms.accelerator.device import Device
from isthmus.platforms.accelerator.kernels import Kernels
from isthmus.platforms.cuda.flashinfer_attention import FlashInferFirst
from isthmus.platforms.cuda.flashinfer_library import HALVES, Limits
from isthmus.platforms.cuda.runtime import CudaPlatform

from ..device import Emulated

EVERY = Limits((*HALVES, torch.float32), (16, 32, 64, 128, 256))  # the stand-in takes what the laws' models have


class Platform(Emulated, CudaPlatform):
    __doc__ = CudaPlatform.__doc__
    interface_version = 1
    arch_name = "sm_90"
    library = None  # the stand-in

    def kernels(self, device: Device) -> Kernels:
        kernels = Kernels(device)
        self.first = FlashInferFirst(self.library, device, EVERY)
        kernels.makers = (self.first,)
        return kernels
