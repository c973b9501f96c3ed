"""Graphs where torch has none that are neutral to the device: by torch.cuda's own."""
from __future__ import annotations

from collections.abc import Callable

import torch

from ..accelerator.device import Device
from ..accelerator.graph import Graph, accelerator_graph


class CudaGraph:
    """`torch.cuda.CUDAGraph` with the methods of `torch.accelerator.Graph`; all of them share one pool of memory."""

    def __init__(self, pool: object) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool

    def capture_begin(self) -> None:
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def capture_end(self) -> None:
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


def cuda_graphs(device: Device) -> Callable[[], Graph] | str:
    """Makes graphs, or says why there are none. torch.accelerator has had them since torch 2.13."""
    if device.host or hasattr(torch.accelerator, "Graph"):
        return accelerator_graph(device)
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)
