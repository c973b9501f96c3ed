"""The compiled kernels as a library: which of them this processor runs, and the records that `step.h` describes."""
from __future__ import annotations

import ctypes as c
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
BUILDS = {"AVX512": ("amx", "avx512", "avx2"), "AVX2": ("avx2",)}  # by what torch calls the processor, the best first

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
    """One build of the kernels. name: "amx", "avx512", "avx2" or "plain"."""

    def __init__(self, path: Path, name: str) -> None:
        self.name, lib = name, c.CDLL(str(path))
        pointer, number = c.c_void_p, c.c_long
        if hasattr(lib, "isthmus_runs") and not lib.isthmus_runs():
            raise OSError("this processor does not run it")
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
    """Builds for a processor of this `torch.backends.cpu.get_cpu_capability()`, the best first; it may lack what the
    first needs."""
    return BUILDS.get(capability, ("plain",))


def open_best(capability: str) -> Library | str:
    """The best build that this processor runs, or why there is none."""
    opened = [open_library(name) for name in builds_for(capability)]
    return next((found for found in opened if isinstance(found, Library)), opened[-1])


def open_library(name: str) -> Library | str:
    """The build called `name`, or why there is none."""
    found = sorted(HERE.glob(f"kernels_{name}.*"))
    if not found:
        return "not built: there was no C++ compiler when isthmus was installed"
    try:
        return Library(found[0], name)
    except OSError as error:
        return f"cannot be loaded: {error}"
