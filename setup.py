"""Builds the compiled kernels of the cpu platform where there is a C++ compiler; all else is in pyproject.toml."""
import platform
import sys

from setuptools import Extension, setup

HERE = "platforms/cpu/compiled/"
FLAGS = ["-O3", "-std=c++17", "-ffp-contract=fast", "-pthread", "-Wno-psabi"]
X86 = {"avx512": "x86-64-v4", "avx2": "x86-64-v3"}
HEADERS = [f"{HERE}{name}.h" for name in ("vec", "packed", "product", "rows", "attention", "pool", "step")]


def build(name: str, flags: list[str]) -> Extension:
    """One library of the kernels. It is loaded by its C interface and is no Python module."""
    return Extension(f"isthmus.platforms.cpu.compiled.kernels_{name}", [f"{HERE}program.cpp"], depends=HEADERS,
                     extra_compile_args=FLAGS + flags, extra_link_args=["-pthread"], language="c++", optional=True)


def builds() -> list[Extension]:
    if sys.platform == "win32":
        return []
    if platform.machine() in ("x86_64", "AMD64"):
        return [build(name, [f"-march={arch}"]) for name, arch in X86.items()]
    return [build("plain", [])]


setup(ext_modules=builds())
