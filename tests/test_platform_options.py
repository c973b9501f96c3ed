"""Values of options in the manifest files of cuda and rocm are those of their code; xpu's and npu's are held to it by
their own tests, which a change of the one does not concern."""
from __future__ import annotations

import pytest
from isthmus.core.discovery import list_platforms
from isthmus.core.manifests import read_claim

pytest.importorskip("torch", reason="the accelerators need torch")

from isthmus.platforms.accelerator.base import MODES
from isthmus.platforms.cuda.flashinfer_library import MODES as FLASHINFER
from isthmus.platforms.cuda.runtime import ACTIVATIONS
from isthmus.platforms.rocm.aiter_library import MODES as AITER

COST = 5  # seconds
KNOWN = {"cuda": {"activations": tuple(ACTIVATIONS), "flashinfer": FLASHINFER},
         "rocm": {"activations": tuple(ACTIVATIONS), "aiter": AITER}}


@pytest.mark.parametrize("name", KNOWN)
def test_values_of_the_file_are_those_of_the_code(name):
    assert read_claim(list_platforms()[name]).options == {"graphs": MODES} | KNOWN[name]
