"""Builds the compiled kernels of the cpu platform where there is a C++ compiler; all else is in pyproject.toml.

ISTHMUS_BUILD_KERNELS=0 leaves them out, where another platform is to compute: they take half a minute or more."""
import os
import platform
import sys

from setuptools import Extension, setup

HERE = "platforms/cpu/compiled/"
FLAGS = ["-std=c++17", "-ffp-contract=fast", "-pthread", "-Wno-psabi"]
# -O3 takes twice as long to compile and is some 15 % faster with AVX-512, where it was measured.
TILES = ["-mamx-tile", "-mamx-bf16", "-mavx512vnni"]
V4 = ["-march=x86-64-v4", "-O3"]
X86 = {"amx": V4 + TILES, "avx512": V4, "avx2": ["-march=x86-64-v3", "-O2"]}
NAMES = ("vec", "packed", "pack", "product", "rows", "attention", "matrix", "plan", "pool", "step",
         "tiled")
HEADERS = [f"{HERE}{name}.h" for name in NAMES]


def build(name: str, flags: list[str]) -> Extension:
    """One library of the kernels. It is loaded by its C interface and is no Python module."""
    return Extension(f"isthmus.platforms.cpu.compiled.kernels_{name}", [f"{HERE}program.cpp"], depends=HEADERS,
                     extra_compile_args=FLAGS + flags, extra_link_args=["-pthread"], language="c++", optional=True)


def builds() -> list[Extension]:
    if sys.platform == "win32" or os.environ.get("ISTHMUS_BUILD_KERNELS") == "0":
        return []
    if platform.machine() in ("x86_64", "AMD64"):
        return [build(name, flags) for name, flags in X86.items()]
    return [build("plain", ["-O2"])]


setup(ext_modules=builds())
