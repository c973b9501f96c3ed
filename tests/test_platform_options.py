"""Values of options in the accelerators' manifest files are those of their code."""
from __future__ import annotations

import pytest
from isthmus.core.discovery import list_platforms
from isthmus.core.manifests import read_claim

pytest.importorskip("torch", reason="the accelerators need torch")

from isthmus.platforms.accelerator.base import MODES
from isthmus.platforms.cuda.flashinfer_library import MODES as FLASHINFER
from isthmus.platforms.cuda.runtime import ACTIVATIONS
from isthmus.platforms.npu.runtime import CHOICES
from isthmus.platforms.xpu.runtime import SWITCHES

COST = 5  # seconds
KNOWN = {"cuda": {"activations": tuple(ACTIVATIONS), "flashinfer": FLASHINFER},
         "rocm": {"activations": tuple(ACTIVATIONS)}, "npu": CHOICES,
         "xpu": {"operators": SWITCHES, "triton": SWITCHES}}


@pytest.mark.parametrize("name", KNOWN)
def test_values_of_the_file_are_those_of_the_code(name):
    assert read_claim(list_platforms()[name]).options == {"graphs": MODES} | KNOWN[name]
