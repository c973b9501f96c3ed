"""Ranks of tensor parallelism in processes of their own. Rank 0 is in the engine's process and serves; the others load
the same model for themselves and then do, in the same order, what rank 0's platform is told.

They meet, for what they sum, in the folder that the environment variable `RENDEZVOUS` names in every rank.
"""
from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from ..config import Config
from ..errors import EngineDead
from ..logs import set_up_logging
from ..plan import Batch, Bias, Mask, Penalties, Sampling
from ..specs import Bucket, StateSpec
from .wire import SPOKE, Start, describe, encode, read_socket, start_worker, write_socket
from .workers import describe_exit

log = logging.getLogger(__name__)

RENDEZVOUS = "ISTHMUS_RENDEZVOUS"
NESTED: dict[str, Any] = {"sampling": Sampling, "penalties": Penalties, "bias": Bias, "mask": Mask}


class Ranks:
    """A platform whose ranks are processes, as one `Platform`: each call is this process's rank's, and is passed on.

    What the other ranks log goes to the same place; one that ends makes every later call raise `EngineDead`.
    """

    def __init__(self, platform: Any, config: Config, world: int) -> None:
        self.platform, self.dead, self._closing = platform, "", False
        self.directory = tempfile.mkdtemp(prefix="isthmus-ranks-")  # mkdtemp makes it 0700
        os.environ[RENDEZVOUS] = self.directory
        self._context = zmq.Context()
        start = msgspec.json.encode(Start(self.directory, os.getpid(), config)) + b"\n"
        self._processes = [self._spawn(rank, world, start) for rank in range(1, world)]
        self._sockets = [write_socket(self._context, self.directory, f"rank{rank}") for rank in range(1, world)]

    def __getattr__(self, name: str) -> Any:
        """Questions, and what needs no other rank; pages on the host would be shares of pages."""
        if name in ("export_pages", "import_pages"):
            raise AttributeError(name)
        return getattr(self.platform, name)

    def alloc(self, spec: StateSpec, pages: int) -> Any:
        self._tell("alloc", spec, pages)
        return self.platform.alloc(spec, pages)

    def compile(self, forward: Callable[..., Any], weights: Any, bucket: Bucket | None) -> Callable[..., Any]:
        step = self.platform.compile(forward, weights, bucket)
        if not weights:  # a look at this rank's own ops, which is not the model's step
            return step

        def launch(state: Any, batch: Batch) -> Any:
            self._tell("step", bucket, pack(batch))
            return step(state, batch)
        return launch

    def copy_pages(self, state: Any, src: Sequence[int], dst: Sequence[int]) -> Any:
        self._tell("copy_pages", list(map(int, src)), list(map(int, dst)))
        return self.platform.copy_pages(state, src, dst)

    def close(self) -> None:
        self._closing = True
        for process in self._processes:
            process.stdin.close()
        getattr(self.platform, "close", lambda: None)()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for socket in self._sockets:
            socket.close(0)
        self._context.term()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _tell(self, *message: Any) -> None:
        if self.dead:
            raise EngineDead(self.dead)
        data = encode(message)
        for socket in self._sockets:
            socket.send(data)

    def _spawn(self, rank: int, world: int, start: bytes) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-P", "-m", __name__, str(rank), str(world)],
                                   stdin=subprocess.PIPE)
        process.stdin.write(start)
        process.stdin.flush()
        threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        return process

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            self.dead = describe_exit(f"rank {rank}", code)
            log.critical("%s", self.dead)


def pack(value: Any) -> Any:
    """A batch as plain lists and bytes."""
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, value.tobytes()]
    return value if value is None else list(map(pack, value))


def unpack(kind: Any, packed: Sequence[Any]) -> Any:
    """The batch, or part of one, that `pack` took apart."""
    fields = {}
    for name, value in zip(kind._fields, packed, strict=True):
        if value is not None and name not in NESTED:
            dtype, shape, data = value
            value = np.frombuffer(bytearray(data), dtype).reshape(shape)
        fields[name] = value if value is None or name not in NESTED else unpack(NESTED[name], value)
    return kind(**fields)


def follow(platform: Any, model: Any, receive: Callable[[], bytes]) -> None:
    """Do what rank 0 tells, until the process ends. A step that fails is logged: rank 0 deals with its requests."""
    state, steps, previous = None, {}, None
    while True:
        name, *given = msgspec.msgpack.decode(receive())
        if name == "step":
            bucket = None if given[0] is None else Bucket(**given[0])
            if bucket not in steps:
                steps[bucket] = platform.compile(model.forward, model.weights, bucket)
            out, state = steps[bucket](state, unpack(Batch, given[1]))
            if previous is not None:
                collect(previous)
            previous = out
            continue
        if previous is not None:
            collect(previous)
            previous = None
        if name == "alloc":
            state = None  # before there is a second one
            state = platform.alloc(msgspec.convert(given[0], StateSpec), given[1])
        else:
            state = platform.copy_pages(state, *given)


def collect(out: Any) -> None:
    try:
        out.collect()
    except Exception as error:
        log.error("a step failed here: %s", error)


def main(rank: int, world: int) -> None:
    """A rank other than 0, from its configuration on standard input."""
    from ..startup import load_rank
    start = start_worker()
    os.environ[RENDEZVOUS] = start.directory
    set_up_logging(start.config.server)
    socket = read_socket(zmq.Context(), start.directory, f"rank{rank}")
    try:
        follow(*load_rank(start.config, rank, world), socket.recv)
    except BaseException as error:  # threads of the platform's may keep a process from ending in order
        log.critical("rank %d: %s", rank, describe(error))
        os._exit(SPOKE)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
