"""AITER as it is installed: its operators by name, and whether they come built."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...core.platform import Unavailable

NAME = "aiter"
MODES = ("auto", "build", "off")  # auto: what comes built, and what is Triton's
PLACES = {  # operator -> where it is, and what the names of the compiled modules that it needs begin with
    "gemm_a8w8": ("aiter", ("module_gemm_a8w8",)),
    "gemm_a8w8_blockscale": ("aiter", ("module_gemm_a8w8_blockscale",)),
    "fused_moe": ("aiter.fused_moe", ("module_moe_sorting", "module_moe_asm", "module_moe_ck2stages")),
    "shuffle_weight": ("aiter.ops.shuffle", ()),
    "unified_attention": ("aiter.ops.triton.unified_attention", ()),
}
TOGETHER = "aiter_"  # one module that holds them all
ENUMS = ("ActivationType", "QuantType")  # of `aiter` itself


@dataclass
class Library:
    """What was found; missing: the reason by name for what was not."""

    version: str
    found: dict[str, Callable[..., Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["found"][name]
        except KeyError:
            raise AttributeError(name) from None

    def has(self, *names: str) -> bool:
        return all(name in self.found for name in names)


def chosen(mode: str) -> Library | str:
    """The library, or why it does not serve. mode: one of `MODES`."""
    if mode not in MODES:
        raise Unavailable(f"aiter={mode!r}: one of {', '.join(MODES)} is needed")
    if mode == "off":
        return "turned off by an option"
    if (spec := find_spec(NAME)) is None:
        return "not installed"
    try:
        top = import_module(NAME)
        library = Library(metadata.version("amd-aiter"))
    except Exception as error:  # whatever its start-up raises: no device, no compiler, another torch
        return f"cannot be imported: {type(error).__name__}: {error}"[:300]
    built = {path.name.partition(".")[0] for folder in spec.submodule_search_locations or ()
             for path in Path(folder, "jit").glob("*.so")}
    for name, (place, modules) in PLACES.items():
        lacking = [each for each in modules if not any(module.startswith(each) for module in built)]
        if lacking and mode == "auto" and TOGETHER not in built:
            library.missing[name] = (f"{lacking[0]} is not built: build AITER with PREBUILD_KERNELS=1, or say "
                                     "aiter=build")
            continue
        try:
            library.found[name] = getattr(import_module(place), name)
        except Exception as error:
            library.missing[name] = f"{type(error).__name__}: {error}"[:300]
    library.found |= {name: getattr(top, name) for name in ENUMS if hasattr(top, name)}
    return library
