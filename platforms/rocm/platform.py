"""The platform of AMD GPUs: Triton kernels, HIP graphs."""
from __future__ import annotations

from ...core.platform import INTERFACE_VERSION, Unavailable
from .driver import reason_against

if (reason := reason_against()) is not None:  # before torch is imported, which takes seconds
    raise Unavailable(reason)

from .runtime import RocmPlatform


class Platform(RocmPlatform):
    __doc__ = RocmPlatform.__doc__
    interface_version = INTERFACE_VERSION
