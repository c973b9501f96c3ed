"""The soak of `tests/soak.py`, short: the whole one is 200 clients for 180 seconds."""
from __future__ import annotations

import pytest

from .soak import soak

COST = 120  # seconds


@pytest.mark.slow
def test_clients_that_hang_up_leave_nothing_behind():
    pytest.importorskip("torch")
    result = soak(clients=60, seconds=25, flags=["--platform=cpu", "--kv-cache-memory=100MiB"])
    assert not result["problems"], result["problems"]
