"""The cuda platform as on an H100 with few multiprocessors: Triton's kernels in the interpreter, recorded graphs."""
from __future__ import annotations

from ..interpreter import interpret

interpret()  # before a kernel is defined

from isthmus.platforms.cuda.runtime import CudaPlatform  # noqa: E402

from ..device import Emulated  # noqa: E402


class Platform(Emulated, CudaPlatform):
    __doc__ = CudaPlatform.__doc__
    interface_version = 1
    name = "cuda_emulated"
    arch_name = "sm_90"
