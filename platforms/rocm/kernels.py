"""What AMD GPUs compute with: Triton's kernels, else torch. Tiles for waves of 64 and 32 lanes are `triton_kit`'s.

fp8 differs: gfx942 multiplies the "fnuz" kind alone, gfx950 and gfx12 the kind that checkpoints have (OCP), others
none. Weights are turned into the device's kind at load; where it has none they are expanded in registers.
"""
from __future__ import annotations

from importlib.util import find_spec

from ..accelerator.device import Device
from ..accelerator.kernels import Kernels

FP8_UNITS = {"gfx942": "fnuz", "gfx950": "fn", "gfx1200": "fn", "gfx1201": "fn"}


def make_kernels(device: Device, narrow: bool | None) -> Kernels:
    """The kernels for this device. narrow: whether activations of 8-bit weights are quantized, None = where the
    checkpoint was made for it."""
    if find_spec("triton") is None:
        return Kernels(device)
    from ..triton_kit.kernels import TritonKernels
    from ..triton_kit.weights import Policy
    return TritonKernels(device, Policy(FP8_UNITS.get(device.arch, "none"), narrow))
