"""The accelerator base alone, with the paths composed of torch operators: what its heirs start from."""
from __future__ import annotations

from isthmus.platforms.accelerator.base import AcceleratorPlatform

from ..device import Emulated


class Platform(Emulated, AcceleratorPlatform):
    __doc__ = AcceleratorPlatform.__doc__
    interface_version = 1
    name = "composed"
