"""Where the tests of kernels run: on the device if there is one, else in the interpreter.

    from .interpreter import prepare
    DEVICE = prepare()  # where tests make their tensors; skips the module where it cannot run
    from isthmus.platforms.triton_kit import ...  # noqa: E402

With a device and nothing said, or TRITON_INTERPRET=0, the tests run compiled, on the device.

This folder has no __init__.py: pytest would take it for the package `triton`.
"""
from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from ..emulation.interpreter import interpret


def prepare() -> torch.device:
    """Choose the mode before a kernel is defined; skip the calling module with the reason where neither can run."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed", allow_module_level=True)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if os.environ.setdefault("TRITON_INTERPRET", "1" if device is None else "0") in ("", "0"):
        if device is None:
            pytest.skip("TRITON_INTERPRET=0 and no device", allow_module_level=True)
        return device
    try:
        interpret()
    except RuntimeError as error:
        pytest.skip(str(error), allow_module_level=True)
    return torch.device("cpu")
