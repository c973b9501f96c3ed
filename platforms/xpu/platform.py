"""The platform of Intel GPUs: oneDNN through torch, vllm-xpu-kernels and Triton where installed, SYCL graphs."""
from __future__ import annotations

from ...core.platform import INTERFACE_VERSION, Unavailable
from .driver import reason_against

if (reason := reason_against()) is not None:  # before torch is imported, which takes seconds
    raise Unavailable(reason)

from .runtime import XpuPlatform


class Platform(XpuPlatform):
    __doc__ = XpuPlatform.__doc__
    interface_version = INTERFACE_VERSION
