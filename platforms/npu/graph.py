"""Graphs of torch.npu, behind the protocol of the accelerator base."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..accelerator.graph import Graph


class NpuGraph:
    """As `torch.accelerator.Graph`, which torch_npu does not stand behind: its own class takes the pool and the mode
    where the capture begins. pool: shared by the graphs that are given the same list."""

    def __init__(self, pool: list[Any]) -> None:
        self.graph, self.shared = torch.npu.NPUGraph(), pool

    def capture_begin(self) -> None:
        self.graph.capture_begin(pool=self.shared[0] if self.shared else None, capture_error_mode="thread_local")

    def capture_end(self) -> None:
        self.graph.capture_end()
        if not self.shared:
            self.shared.append(self.graph.pool())

    def replay(self) -> None:
        self.graph.replay()


def npu_graphs() -> Callable[[], Graph] | str:
    """Makes graphs that share one pool of memory, or why there are none."""
    if not hasattr(torch.npu, "NPUGraph"):
        return "this torch_npu has no NPUGraph: 2.6 or later has"
    pool: list[Any] = []
    return lambda: NpuGraph(pool)
