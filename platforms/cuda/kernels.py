"""What NVIDIA GPUs compute with: FlashInfer where it is installed and a trial let it, Triton's kernels, else torch."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from ..accelerator.device import Device
from ..accelerator.graph import Graph
from ..accelerator.kernels import Kernels
from ..accelerator.trial import Trials
from .flashinfer_attention import FlashInferFirst
from .flashinfer_library import chosen, nothing_compiled

if TYPE_CHECKING:
    from ..triton_kit.weights import Policy

FP8_UNITS = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")


def make_kernels(device: Device, narrow: bool | None, flashinfer: str = "auto", sizes: Sequence[int] = (),
                 graphs: Callable[[], Callable[[], Graph] | str] = lambda: "there are none") -> Kernels:
    """The kernels for this device. narrow: whether activations of 8-bit weights are quantized, None = where the
    checkpoint was made for it. flashinfer: "auto", "build" or "off"; raises `Unavailable` for another word. sizes: the
    numbers of tokens that steps have. graphs: gives what makes graphs, or says why there are none."""
    library, build = chosen(flashinfer), flashinfer == "build"
    within = nullcontext if build else nothing_compiled
    if isinstance(library, str):
        kernels = shared_kernels(device, narrow)
        kernels.notes["FlashInfer"] = library
        return kernels
    kernels = shared_kernels(device, narrow, library, build, Trials(device, sizes, graphs, within))
    kernels.makers = (FlashInferFirst(library, device, within=within),)
    return kernels


def shared_kernels(device: Device, narrow: bool | None, library: ModuleType | None = None, build: bool = False,
                   trials: Trials | None = None) -> Kernels:
    """Triton's, with FlashInfer's products where there is a library, or torch's operators where there is no Triton.
    build: whether kernels that are compiled for each shape may be tried too."""
    if find_spec("triton") is None:
        return Kernels(device)
    from ..triton_kit.kernels import TritonKernels
    from ..triton_kit.weights import Policy
    policy = Policy("fn" if device.arch.startswith(FP8_UNITS) else "none", narrow)
    if library is None:
        return TritonKernels(device, policy)
    return with_flashinfer(library, device, policy, build, trials)


def with_flashinfer(library: ModuleType, device: Device, policy: Policy, build: bool, trials: Trials) -> Kernels:
    """Triton's, and what this version of the library has of what is called here, each behind its trial."""
    from ..triton_kit.library import LibraryKernels
    from .flashinfer_experts import FusedExperts
    from .flashinfer_products import BlockProducts, Nvfp4Products, TensorProducts
    kernels, lacking = LibraryKernels(device, policy, trials), []
    for taken, name, make in (
            (True, "offers", TensorProducts), (build, "offers", BlockProducts), (True, "packed", Nvfp4Products),
            (True, "experts", FusedExperts), (build, "experts", partial(FusedExperts, blocks=True))):
        try:
            getattr(kernels, name).extend([make(library, device.arch)] if taken else [])
        except AttributeError as error:  # another version
            lacking.append(str(error))
    kernels.notes["products and experts"] = f"FlashInfer {library.__version__} where a trial let it, else Triton" + (
        f"; not tried: {', '.join(lacking)}" if lacking else "")
    return kernels
