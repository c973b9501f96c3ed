"""Starting kernels, so that a recorder can see each start; and the configurations to compile ahead of time."""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Recorder = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")

_active = threading.local()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Start `kernel` on a grid of one to three axes, or let this thread's recorder do so. An empty grid starts none.

    meta: the kernel's compile-time constants, and num_warps and num_stages where its defaults are not wanted.
    """
    if 0 in grid:
        return
    record = getattr(_active, "recorder", None)
    if record is not None:
        record(kernel, grid, args, meta)
    else:
        kernel[grid](*args, **meta)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Within the block, `recorder(kernel, grid, args, meta)` is called for each launch of this thread, and is to start
    it."""
    before = getattr(_active, "recorder", None)
    _active.recorder = recorder
    try:
        yield
    finally:
        _active.recorder = before


@dataclass(frozen=True)
class Specialization:
    """One configuration of a kernel that a platform uses, to be compiled ahead of time for every target.

    name:      unique in its module, e.g. "decode bf16 d128 g8".
    signature: Triton type of each runtime parameter by name: "*bf16", "*fp8e4nv", "i32", "fp32" ...
               A type ending in ":16" promises a multiple of 16 (pointers and strides of whole tensors keep that).
    constants: value of each compile-time parameter by name; an absent pointer is the constant None.
    warps, stages: as given to `launch`; a target may have its own in `tuning`: {"gfx942": {"num_warps": 8}}.
    unsupported: reason by target, or by a prefix of its name ("gfx"), for targets that are not to run this. They are
               not compiled. A spill or a tile over the target's limits fails for all others.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 2
    tuning: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)

    def reason(self, target: str) -> str | None:
        """Why `target` is not to run this, or None."""
        return next((why for prefix, why in self.unsupported.items() if target.startswith(prefix)), None)

    def options(self, target: str) -> dict[str, int]:
        """Compiler options for `target`; the longest prefix of its name in `tuning` wins."""
        own = max((prefix for prefix in self.tuning if target.startswith(prefix)), key=len, default=None)
        return {"num_warps": self.warps, "num_stages": self.stages, **(self.tuning[own] if own else {})}
