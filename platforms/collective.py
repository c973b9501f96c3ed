"""Sums over the ranks of the torch platforms, each in a process of its own, by torch.distributed."""
from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ..core.platform import Unavailable

RENDEZVOUS = "ISTHMUS_RENDEZVOUS"  # names the folder where ranks meet (core/processes/ranks.py)
TIMEOUT = timedelta(minutes=10)    # loading a large model may take some ranks longer than others


def join(backend: str, rank: int, world: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Meet the other ranks, once: what sums a tensor over all of them, in place where it can.

    backend: "gloo" (host processors), "nccl" (CUDA, ROCm), "xccl", "hccl". Raises `Unavailable` where torch lacks it,
    or where nobody started the other ranks.
    """
    folder = os.environ.get(RENDEZVOUS)
    if folder is None:
        raise Unavailable(f"{RENDEZVOUS} is not set: ranks are started by the engine (--tensor-parallel-size {world})")
    if not dist.is_available() or not dist.is_backend_available(backend):
        raise Unavailable(f"torch {torch.__version__} was built without {backend}, which {world} ranks need")
    if not dist.is_initialized():
        dist.init_process_group(backend, init_method=Path(folder, "torch").as_uri(), rank=rank, world_size=world,
                                timeout=TIMEOUT)

    def reduce(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x
    return reduce


def leave() -> None:
    """Give the group up, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
