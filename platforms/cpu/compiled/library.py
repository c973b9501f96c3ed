"""The compiled kernels as a library: which of them this processor runs, and the records that `step.h` describes."""
from __future__ import annotations

import ctypes as c
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
BUILDS = {"AVX512": "avx512", "AVX2": "avx2"}  # by what torch calls the processor; others have the plain build

VIEW = np.dtype([("at", "i8"), ("row", "i8"), ("head", "i8")])
WEIGHT = np.dtype([(name, "i8") for name in ("at", "format", "outputs", "inputs", "block")])
OP = np.dtype([("kind", "i8"), ("barrier", "i8"), ("x", VIEW), ("y", VIEW), ("z", VIEW), ("w", WEIGHT), ("norm", "i8"),
               ("bias", "i8"), ("rows", "i8"), ("heads", "i8"), ("width", "i8"), ("act", "i8"), ("layer", "i8"),
               ("index", "i8"), ("eps", "f4"), ("scale", "f4"), ("softcap", "f4"), ("window", "i4")])
KINDS, ORDER = 14, 2
ADAPTERS = np.dtype([(name, "i8") for name in ("owners", "blocks", "active", "count")])
LAYER = np.dtype([("kv", "i8"), ("kv_heads", "i8"), ("d", "i8")])
ARRAYS = ("tokens", "positions", "slots", "starts", "lengths", "pages", "logit_rows")
STEP = np.dtype([(name, "i8") for name in (*ARRAYS, "rows", "page_stride", "page_size", "layers")])


class Library:
    """One build of the kernels. name: "avx512", "avx2" or "plain"."""

    def __init__(self, path: Path, name: str) -> None:
        self.name, lib = name, c.CDLL(str(path))
        pointer, number = c.c_void_p, c.c_long
        sizes = [lib.isthmus_size(which) for which in range(3)]
        if sizes != [OP.itemsize, LAYER.itemsize, STEP.itemsize] or not hasattr(lib, "isthmus_order") or (
                lib.isthmus_kinds(), lib.isthmus_order()) != (KINDS, ORDER):
            raise OSError(f"{path} was built from other sources than these: install isthmus again")
        self.engine, self.close, self.run = lib.isthmus_engine, lib.isthmus_close, lib.isthmus_run
        self.engine.restype, self.engine.argtypes = pointer, [c.c_int]
        self.close.restype, self.close.argtypes = None, [pointer]
        self.run.restype, self.run.argtypes = None, [pointer, pointer, number, pointer]
        self.pack_bf16 = lib.isthmus_pack_bf16
        self.pack_int8, self.pack_int4 = lib.isthmus_pack_int8, lib.isthmus_pack_int4
        self.pack_bf16.restype, self.pack_bf16.argtypes = None, [pointer, number, number, pointer]
        for pack in (self.pack_int8, self.pack_int4):
            pack.restype, pack.argtypes = None, [pointer, pointer, pointer, number, number, pointer]


def builds_for(capability: str) -> tuple[str, ...]:
    """Every build that such a processor runs, the best first."""
    best = build_for(capability)
    names = tuple(BUILDS.values())
    return names[names.index(best):] if best in names else (best,)


def build_for(capability: str) -> str:
    """The name of the build for a processor of this `torch.backends.cpu.get_cpu_capability()`."""
    return BUILDS.get(capability, "plain")


def open_library(name: str) -> Library | str:
    """The build called `name`, or why there is none."""
    found = sorted(HERE.glob(f"kernels_{name}.*"))
    if not found:
        return "not built: there was no C++ compiler when isthmus was installed"
    try:
        return Library(found[0], name)
    except OSError as error:
        return f"cannot be loaded: {error}"
