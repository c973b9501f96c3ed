"""A graph for the CPU: it records the calls of torch operators and Triton kernels, and replays them on the same memory.

What a real graph would get wrong is an error here: an operator that waits for the device (reads a value on the host),
and a result whose size depends on data.
"""
from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

WAITS = {"aten._local_scalar_dense", "aten.item", "aten.nonzero", "aten.masked_select", "aten.unique_dim",
         "aten._unique2", "aten.bincount", "aten.equal", "aten.is_nonzero", "aten.repeat_interleave.Tensor"}
FRESH = {"aten.empty", "aten.empty_strided", "aten.new_empty", "aten.empty_like"}


# What has no operator of its own.
READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}


class CaptureError(RuntimeError):
    """What a real device would have refused to capture."""


class _Recording(TorchDispatchMode):
    def __init__(self, calls: list[Callable[[], None]]) -> None:
        super().__init__()
        self.calls, self.paused = calls, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = str(func)
        if any(name == wait or name.startswith(wait + ".") for wait in WAITS):
            raise CaptureError(f"{name} waits for the device")
        if name.startswith("aten.index.Tensor") or name.startswith("aten.index_put"):
            if any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
                raise CaptureError(f"{name} with a mask: its size depends on data")
        result = func(*args, **kwargs)
        self.calls.append(_replayed(func, args, kwargs, result))
        return result


class _Reading(TorchFunctionMode):
    paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and not self.paused:
            raise CaptureError(f"{func.__name__} waits for the device")
        return func(*args, **(kwargs or {}))


def _replayed(func: Any, args: Any, kwargs: Any, result: Any) -> Callable[[], None]:
    """Compute the call again, and put what it gives where it was when it was captured."""
    places = [part for part in tree_flatten(result)[0] if isinstance(part, torch.Tensor)]
    aliased = {id(part) for part in tree_flatten((args, kwargs))[0]}
    storages = {part.untyped_storage().data_ptr() for part in tree_flatten((args, kwargs))[0]
                if isinstance(part, torch.Tensor)}
    if str(func).rsplit(".", 1)[0] in FRESH:
        return lambda: None
    if places and all(part.untyped_storage().data_ptr() in storages for part in places):
        if all(id(part) in aliased for part in places):  # in place
            return lambda: func(*args, **kwargs)
        return lambda: None  # a view: it lies where it lay

    def again() -> None:
        new = [part for part in tree_flatten(func(*args, **kwargs))[0] if isinstance(part, torch.Tensor)]
        for place, value in zip(places, new, strict=True):
            if place.shape != value.shape:
                raise CaptureError(f"{func} gave {list(value.shape)} after {list(place.shape)}")
            place.copy_(value)
    return again


class RecordedGraph:
    """As `torch.accelerator.Graph`."""

    made = replayed = 0

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self._open: ExitStack | None = None
        RecordedGraph.made += 1

    def capture_begin(self) -> None:
        self._open = ExitStack()
        self._modes = [self._open.enter_context(mode) for mode in (_Reading(), _Recording(self.calls))]
        try:
            from isthmus.platforms.triton_kit.launch import recording
        except ImportError:  # no Triton here: there are no kernels to record
            return
        self._open.enter_context(recording(self._kernel))

    def capture_end(self) -> None:
        self._open.close()
        self._open = None

    def replay(self) -> None:
        RecordedGraph.replayed += 1
        with torch.inference_mode():
            for call in self.calls:
                call()

    def _kernel(self, kernel: Any, grid: Any, args: Any, meta: Any) -> None:
        """Start it, unseen: the interpreter itself computes with torch and numpy."""
        for mode in self._modes:
            mode.paused = True
        try:
            kernel[grid](*args, **meta)
        finally:
            for mode in self._modes:
                mode.paused = False
        self.calls.append(lambda: kernel[grid](*args, **meta))
