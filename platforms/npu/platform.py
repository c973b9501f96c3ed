"""The platform of Ascend NPUs: torch_npu's fused operators, graphs of torch.npu."""
from __future__ import annotations

from ...core.platform import INTERFACE_VERSION, Unavailable
from .driver import reason_against

if (reason := reason_against()) is not None:  # before torch is imported, which takes seconds
    raise Unavailable(reason)

from .runtime import NpuPlatform


class Platform(NpuPlatform):
    __doc__ = NpuPlatform.__doc__
    interface_version = INTERFACE_VERSION
