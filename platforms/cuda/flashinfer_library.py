"""FlashInfer as it is installed, and which attention it takes. Products and experts: `flashinfer_products.py` and
`flashinfer_experts.py`."""
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from ...core.platform import AttentionSpec, Unavailable
from ..accelerator.cache import LayerCache

NAME, BUILT = "flashinfer", "flashinfer_jit_cache"
NO_COMPILER = "FLASHINFER_DISABLE_JIT"  # read at each build
MODES = ("auto", "build", "off")  # auto: where its kernels come built
HALVES = (torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def chosen(mode: str) -> ModuleType | str:
    """The library, or why it does not serve. mode: one of `MODES`."""
    if mode not in MODES:
        raise Unavailable(f"flashinfer={mode!r}: one of {', '.join(MODES)} is needed")
    if mode == "off":
        return "turned off by an option"
    if find_spec(NAME) is None:
        return "not installed"
    if mode == "auto" and find_spec(BUILT) is None:
        return ("installed without flashinfer-jit-cache, so that each kernel would be compiled at its first use, which "
                "takes minutes: install that, or say flashinfer=build")
    try:
        return import_module(NAME)
    except Exception as error:  # whatever its start-up raises: a wrong torch, a missing compiler, a missing device
        return f"cannot be imported: {type(error).__name__}: {error}"[:300]


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Within the block FlashInfer raises where it would compile a kernel, which takes minutes."""
    before = os.environ.get(NO_COMPILER)
    os.environ[NO_COMPILER] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_COMPILER]
        else:
            os.environ[NO_COMPILER] = before


@dataclass(frozen=True)
class Case:
    """What attention's plan depends on beyond a step's batch."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    spec: AttentionSpec

    @classmethod
    def of(cls, q: torch.Tensor, cache: LayerCache, spec: AttentionSpec) -> Case:
        """q [T, heads, head_dim] and a layer's memory."""
        return cls(q.shape[1], cache.kv_heads, q.shape[2], cache.page_size, q.dtype, cache.kv.dtype, spec)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def tensor_cores(self) -> bool:
        """Whether decode goes by the matrix units: wide groups gain, and the other kernel has groups of 1 to 3 and few
        more. Source: FlashInfer's documentation of `use_tensor_cores`, and DISPATCH_GQA_GROUP_SIZE of its utils.cuh."""
        return self.group > 3 or self.kv_dtype in FP8

    def arguments(self) -> dict[str, object]:
        """Of both wrappers' `plan`. Its window counts the tokens before a query, ours counts the query too."""
        window = self.spec.window
        return {"num_qo_heads": self.heads, "num_kv_heads": self.kv_heads, "page_size": self.page_size,
                "pos_encoding_mode": "NONE", "window_left": -1 if window is None else window - 1,
                "logits_soft_cap": self.spec.softcap, "q_data_type": self.dtype, "kv_data_type": self.kv_dtype,
                "sm_scale": self.spec.scale}


@dataclass(frozen=True)
class Limits:
    """Types of queries, and dimensions of heads, that there are kernels for (DISPATCH_HEAD_DIM of its utils.cuh)."""

    dtypes: tuple[torch.dtype, ...] = HALVES
    head_dims: tuple[int, ...] = (64, 128, 256)

    def reason_against(self, case: Case) -> str | None:
        if case.dtype not in self.dtypes:
            return f"queries in {case.dtype}"
        if case.kv_dtype != case.dtype and case.kv_dtype not in FP8:
            return f"queries in {case.dtype} over {case.kv_dtype}"
        if case.head_dim not in self.head_dims:
            return f"heads of {case.head_dim}: there are {', '.join(map(str, self.head_dims))}"
        return None
