"""The platform of NVIDIA GPUs: Triton kernels, FlashInfer where it is installed, CUDA graphs."""
from __future__ import annotations

from ...core.platform import INTERFACE_VERSION, Unavailable
from .driver import reason_against

if (reason := reason_against()) is not None:  # before torch is imported, which takes seconds
    raise Unavailable(reason)

from .runtime import CudaPlatform


class Platform(CudaPlatform):
    __doc__ = CudaPlatform.__doc__
    interface_version = INTERFACE_VERSION
