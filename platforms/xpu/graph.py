"""SYCL graphs as torch offers them: `torch.accelerator.Graph`, else `torch.xpu.XPUGraph`, shown to work before use."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..accelerator.device import Device
from ..accelerator.graph import Graph, accelerator_graph


class SyclGraph:
    """`torch.xpu.XPUGraph` with the calls of `Graph`; graphs of one `pool` share their memory."""

    def __init__(self, pool: list[Any]) -> None:
        self.graph, self.shared = torch.xpu.XPUGraph(), pool

    def capture_begin(self) -> None:
        if not self.shared:
            self.shared.append(torch.xpu.graph_pool_handle())
        self.graph.capture_begin(pool=self.shared[0])

    def capture_end(self) -> None:
        self.graph.capture_end()

    def replay(self) -> None:
        self.graph.replay()


def sycl_graph() -> Callable[[], Graph]:
    pool: list[Any] = []
    return lambda: SyclGraph(pool)


def graphs(device: Device) -> Callable[[], Graph] | str:
    """The first way of torch's to capture that captures and replays one addition here, or why none does."""
    ways: dict[str, Callable[[], Graph] | str] = {"torch.accelerator.Graph": accelerator_graph(device)}
    ways["torch.xpu.XPUGraph"] = sycl_graph() if hasattr(torch.xpu, "XPUGraph") else "torch has none"
    reasons = []
    for name, make in ways.items():
        why = make if isinstance(make, str) else reason_against(make, device)
        if why is None:
            return make
        reasons.append(f"{name}: {why}")
    return "steps are launched eagerly: " + "; ".join(reasons)


def reason_against(make: Callable[[], Graph], device: Device) -> str | None:
    """Why graphs that `make` makes cannot be used, found out by an addition."""
    try:
        x = torch.zeros(16, device=device.torch)
        device.wait()
        with torch.Stream(device.torch):
            graph = make()
            graph.capture_begin()
            x += 1
            graph.capture_end()
            graph.replay()
            graph.replay()
        device.wait()
        total = x.sum().item()
    except (RuntimeError, TypeError, AttributeError) as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return None if total == 32 else f"two replays of an addition gave {total / 16}"
