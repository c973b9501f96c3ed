"""vllm-xpu-kernels' operators, as far as the installed ones have the schemas that this platform was written against.

`schemas.toml` holds those schemas. An operator that is missing, or has another schema in another version, is left
alone, and the paths below it serve.
"""
from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

SCHEMAS = Path(__file__).with_name("schemas.toml")
PACKAGE = "vllm_xpu_kernels"
MODULES = ("_C", "_moe_C", "_xpu_C", "_vllm_fa2_C")

Operators = Mapping[str, Callable[..., Any]]  # by the name without the library's


def expected() -> dict[str, str]:
    """"library::name" -> schema."""
    schemas = tomllib.loads(SCHEMAS.read_text("utf-8"))["schemas"]
    return {schema.partition("(")[0]: schema for schema in schemas}


def install() -> str | None:
    """Have the package register its operators; why that failed, or None."""
    if find_spec(PACKAGE) is None:
        return "vllm-xpu-kernels is not installed"
    try:
        for module in MODULES:
            import_module(f"{PACKAGE}.{module}")
    except (ImportError, OSError) as error:  # built for another torch or another SYCL runtime
        return f"vllm-xpu-kernels {installed_version()} cannot be loaded: {error}"[:300]
    return None


def installed_version() -> str:
    try:
        return version("vllm-xpu-kernels")
    except PackageNotFoundError:
        return "of unknown version"


def matching() -> tuple[Operators, tuple[str, ...]]:
    """The registered operators of the expected schemas, and the names of those that are missing or differ."""
    found, others = {}, []
    for name, schema in expected().items():
        library, _, short = name.partition("::")
        packet = getattr(getattr(torch.ops, library), short, None)
        overload = getattr(packet, "default", None)
        if overload is not None and overload._schema == torch._C.parse_schema(schema):
            found[short] = overload
        else:
            others.append(short)
    return found, tuple(others)
