"""Sums over the ranks of the torch platforms, each in a process of its own, by torch.distributed."""
from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ..core.platform import Unavailable

RENDEZVOUS = "ISTHMUS_RENDEZVOUS"  # names the folder where ranks meet (core/processes/ranks.py)
FAILED = "failed"                  # a file in it says why nobody needs to wait any more
TIMEOUT = timedelta(minutes=10)    # loading a large model may take some ranks longer than others
LOOK_S = 0.05                      # between two looks who has come


def join(backend: str, rank: int, world: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Meet the other ranks, once: what sums a tensor over all of them, in place where it can.

    backend: "gloo" (host processors), "nccl" (CUDA, ROCm), "xccl", "hccl". Raises `Unavailable` where torch lacks it,
    or where nobody started the other ranks, or they do not come. Whether a rank hangs later on is not seen here: the
    engine watches the steps of all ranks.
    """
    folder = os.environ.get(RENDEZVOUS)
    if folder is None:
        raise Unavailable(f"{RENDEZVOUS} is not set: ranks are started by the engine (--tensor-parallel-size {world})")
    if not dist.is_available() or not dist.is_backend_available(backend):
        raise Unavailable(f"torch {torch.__version__} was built without {backend}, which {world} ranks need")
    if not dist.is_initialized():
        _meet(Path(folder), rank, world)
        dist.init_process_group(backend, init_method=Path(folder, "torch").as_uri(), rank=rank, world_size=world,
                                timeout=TIMEOUT)

    def reduce(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x
    return reduce


def _meet(folder: Path, rank: int, world: int) -> None:
    """Wait until all ranks are here. Raises `Unavailable` that names those who are not, or the reason that a file says.
    """
    (folder / f"here-{rank}").touch()
    end = time.monotonic() + TIMEOUT.total_seconds()
    while missing := [other for other in range(world) if not (folder / f"here-{other}").exists()]:
        if (folder / FAILED).exists():
            raise Unavailable((folder / FAILED).read_text("utf-8"))
        if time.monotonic() > end:
            raise Unavailable(f"rank {', '.join(map(str, missing))} of {world} did not come within {TIMEOUT}")
        time.sleep(LOOK_S)


def leave() -> None:
    """Give the group up, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
