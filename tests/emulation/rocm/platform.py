"""The rocm platform as on an MI300X with few compute units: Triton's kernels in the interpreter, recorded graphs."""
from __future__ import annotations

from ..interpreter import interpret

interpret()  # before a kernel is defined

from isthmus.platforms.rocm.runtime import RocmPlatform  # noqa: E402

from ..device import Emulated  # noqa: E402


class Platform(Emulated, RocmPlatform):
    __doc__ = RocmPlatform.__doc__
    interface_version = 1
    name = "rocm_emulated"
    arch_name = "gfx942"
