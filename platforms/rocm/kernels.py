"""What AMD GPUs compute with: AITER where it is installed and its trials let it, Triton's kernels, else torch. Tiles
for waves of 64 and 32 lanes are `triton_kit`'s.

fp8 differs: gfx942 multiplies the "fnuz" kind alone, gfx950 and gfx12 the kind that checkpoints have (OCP), others
none. Weights are turned into the device's kind at load; where it has none they are expanded in registers.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..accelerator.device import Device
from ..accelerator.graph import Graph
from ..accelerator.kernels import Kernels
from ..accelerator.trial import Trials
from .aiter_library import Library, chosen

if TYPE_CHECKING:
    from ..triton_kit.weights import Policy

FP8_UNITS = {"gfx942": "fnuz", "gfx950": "fn", "gfx1200": "fn", "gfx1201": "fn"}
KINDS = ("dense", "fp8", "fp8_block")  # of experts


def make_kernels(device: Device, narrow: bool | None, aiter: str = "auto", sizes: Sequence[int] = (),
                 graphs: Callable[[], Callable[[], Graph] | str] = lambda: "there are none") -> Kernels:
    """The kernels for this device. narrow: whether activations of 8-bit weights are quantized, None = where the
    checkpoint was made for it. aiter: "auto", "build" or "off"; raises `Unavailable` for another word. sizes: the
    numbers of tokens that steps have. graphs: gives what makes graphs, or says why there are none."""
    library = chosen(aiter)
    if find_spec("triton") is None:
        return Kernels(device)
    from ..triton_kit.kernels import TritonKernels
    from ..triton_kit.weights import Policy
    policy = Policy(FP8_UNITS.get(device.arch, "none"), narrow)
    if isinstance(library, str):
        kernels = TritonKernels(device, policy)
        kernels.notes["AITER"] = library
        return kernels
    return with_aiter(library, device, policy, Trials(device, sizes, graphs))


def with_aiter(library: Library, device: Device, policy: Policy, trials: Trials) -> Kernels:
    """Triton's, with AITER's operators where they are there and a trial lets them."""
    from ..triton_kit.library import LibraryKernels
    from .aiter_attention import AiterFirst
    from .aiter_products import BlockProducts, FusedExperts, RowProducts
    kernels = LibraryKernels(device, policy, trials)
    kernels.offers += [make(library) for name, make in (
        ("gemm_a8w8", RowProducts), ("gemm_a8w8_blockscale", BlockProducts)) if library.has(name)]
    if library.has("fused_moe", "shuffle_weight", "QuantType", "ActivationType"):
        kernels.experts += [FusedExperts(library, kind) for kind in KINDS]
    if library.has("unified_attention"):
        kernels.makers = (AiterFirst(library, device, kernels.plain_backend),)
    kernels.notes["products and experts"] = f"AITER {library.version} where a trial let it, else Triton"
    kernels.notes |= {f"AITER's {name}": reason for name, reason in library.missing.items()}
    return kernels
