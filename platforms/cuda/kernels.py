"""What NVIDIA GPUs compute with: FlashInfer where it is installed and takes the case, Triton's kernels, else torch."""
from __future__ import annotations

from importlib.util import find_spec

from ..accelerator.device import Device
from ..accelerator.kernels import Kernels
from .flashinfer_attention import FlashInferFirst
from .flashinfer_library import chosen

FP8_UNITS = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")


def make_kernels(device: Device, narrow: bool | None, flashinfer: str = "auto") -> Kernels:
    """The kernels for this device. narrow: whether activations of 8-bit weights are quantized, None = where the
    checkpoint was made for it. flashinfer: "auto", "build" or "off"; raises `Unavailable` for another word."""
    library = chosen(flashinfer)
    kernels = shared_kernels(device, narrow)
    if isinstance(library, str):
        kernels.notes["FlashInfer"] = library
    else:
        kernels.makers = (FlashInferFirst(library, device),)
    return kernels


def shared_kernels(device: Device, narrow: bool | None) -> Kernels:
    """Triton's, or torch's operators where there is no Triton."""
    if find_spec("triton") is None:
        return Kernels(device)
    from ..triton_kit.kernels import TritonKernels
    from ..triton_kit.weights import Policy
    return TritonKernels(device, Policy("fn" if device.arch.startswith(FP8_UNITS) else "none", narrow))
