"""Ranks of tensor parallelism in processes of their own. Rank 0 is in the engine's process and serves; the others load
the same model for themselves and then do, in the same order, what rank 0's platform is told.

They meet, for what they sum, in the folder that the environment variable `RENDEZVOUS` names in every rank. A rank that
ends is told at once; one that hangs is ended, with its name and what it was doing, before --step-timeout is over. The
first step of a bucket may take longer as long as some rank computes, since it may compile.
"""
from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import psutil
import zmq

from ..adapters.store import place_as_told
from ..config import Config
from ..errors import EngineDead
from ..logs import set_up_logging
from ..plan import Batch, Bias, Mask, Penalties, Sampling
from ..specs import Bucket, StateSpec
from .client import COMPUTES
from .wire import REPORT, SPOKE, Report, Start, describe, encode, read_socket, start_worker, write_socket
from .workers import describe_exit, spared_signals

log = logging.getLogger(__name__)

RENDEZVOUS = "ISTHMUS_RENDEZVOUS"
FAILED = "failed"  # a file in that folder: says why nobody needs to wait any more (platforms/collective.py)
PATIENCE = 0.9     # share of --step-timeout after which a rank has hung: before the API takes the whole engine for hung
WINDOW = 0.4       # share of that time in which ranks that compute have to show it
TICK_S = 0.25      # between two looks whether a rank is gone, while waiting for a step
LAST_WORDS_S = 1.0  # how long the end of a rank may take to be noticed after a step that failed for it
NESTED: dict[str, Any] = {"sampling": Sampling, "penalties": Penalties, "bias": Bias, "mask": Mask}


class Progress:
    """How many messages each rank has begun and how many it has finished, in a file that all of them map."""

    def __init__(self, directory: str, world: int, create: bool = False) -> None:
        self.counts = np.memmap(Path(directory, "progress"), np.int64, "w+" if create else "r+", shape=(world, 2))

    def begin(self, rank: int) -> None:
        self.counts[rank, 0] += 1

    def finish(self, rank: int) -> None:
        self.counts[rank, 1] += 1


class Work:
    """Whether ranks compute: their processor time over a window in seconds, with that of compilers they started."""

    def __init__(self, window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.window, self._clock = window, clock
        self._at, self._spent = clock(), 0.0

    def note(self) -> None:
        self._at, self._spent = self._clock(), self.spent()

    def none(self) -> bool:
        """Whether next to nothing was computed since the last note, once that is a window ago; then the next begins."""
        age, before = self._clock() - self._at, self._spent
        if age < self.window:
            return False
        self.note()
        return self._spent - before < COMPUTES * age

    def spent(self) -> float:
        """Seconds of this process and those below it, which the other ranks are; of those that ended too."""
        engine, total = psutil.Process(), 0.0
        for process in (engine, *engine.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total


class Told(NamedTuple):
    """A message to the other ranks: the how-manieth, when it was sent, for people what it asks, and when one that does
    not do it within --step-timeout counts as hung."""

    number: int
    at: float
    what: str
    hung: Literal["never", "idle", "always"]


class Joint:
    """A step that all ranks have launched. `EngineDead` comes out of it when one of them is gone."""

    def __init__(self, ranks: Ranks, out: Any) -> None:
        self.ranks, self.collected = ranks, ranks.collector.submit(out.collect)
        self.collected.add_done_callback(lambda _: ranks.owed.popleft())

    def collect(self) -> Any:
        return self.ranks.wait(self.collected)


class Ranks:
    """A platform whose ranks are processes, as one `Platform`: each call is this process's rank's, and is passed on.

    What the other ranks log goes to the same place; one that ends or hangs makes every later call raise `EngineDead`,
    and whoever waits for a step hears of it too. `lost` is set then, and `dead` says why.
    """

    def __init__(self, platform: Any, config: Config, world: int) -> None:
        self.platform, self.dead, self.lost, self._closing = platform, "", threading.Event(), threading.Event()
        self.collector = ThreadPoolExecutor(1, "collect")  # so that nobody waits for what a lost rank owes
        self.directory = tempfile.mkdtemp(prefix="isthmus-ranks-")  # mkdtemp makes it 0700
        os.environ[RENDEZVOUS] = self.directory
        self._patience, self._asked = PATIENCE * config.scheduler.step_timeout, 0
        self._told, self._sent, self._progress = deque[Told](), 0, Progress(self.directory, world, create=True)
        self.owed, self._last, self._work = deque[Told](), None, Work(WINDOW * self._patience)
        self._context = zmq.Context()
        start = msgspec.json.encode(Start(self.directory, os.getpid(), config)) + b"\n"
        self._processes = [self._spawn(rank, world, start) for rank in range(1, world)]
        self._sockets = [write_socket(self._context, self.directory, f"rank{rank}") for rank in range(1, world)]
        threading.Thread(target=self._watch_progress, name="ranks", daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        """Questions, and what needs no other rank; pages on the host would be shares of pages."""
        if name in ("export_pages", "import_pages"):
            raise AttributeError(name)
        return getattr(self.platform, name)

    def alloc(self, spec: StateSpec, pages: int) -> Any:
        self._tell(f"allocating {pages} pages", "alloc", spec, pages)
        return self.platform.alloc(spec, pages)

    def compile(self, forward: Callable[..., Any], weights: Any, bucket: Bucket | None) -> Callable[..., Any]:
        step = self.platform.compile(forward, weights, bucket)
        if not weights:  # a look at this rank's own ops, which is not the model's step
            return step

        launched = False

        def launch(state: Any, batch: Batch) -> Any:
            nonlocal launched
            if batch.sampling.mask is not None:  # it is sent now, so the step before is taken in now
                batch.sampling.mask.ready()
            tokens = int(batch.starts[-1])
            self._tell(f"a step of {tokens} token{'s' if tokens > 1 else ''}", "step", bucket, pack(batch),
                       hung="always" if launched else "idle")  # the first one may compile for long
            launched = True
            out, state = step(state, batch)
            self.owed.append(self._last)
            return Joint(self, out), state
        return launch

    def copy_pages(self, state: Any, src: Sequence[int], dst: Sequence[int]) -> Any:
        self._tell(f"copying {len(src)} pages", "copy_pages", list(map(int, src)), list(map(int, dst)),
                   hung="always")
        return self.platform.copy_pages(state, src, dst)

    def place_adapters(self, slots: Sequence[tuple[str, str] | None]) -> None:
        """Have the other ranks load the adapters of all slots too: folder and digest of each."""
        self._tell("loading adapters", "adapters", slots)

    def wait(self, collected: Future) -> Any:
        """What a step gave. Raises `EngineDead` when a rank is gone, whether or not the step still waits for it."""
        while not self.dead and not collected.done():
            with suppress(TimeoutError):
                collected.exception(TICK_S)
        if self.dead or (collected.exception() is not None and self.lost.wait(LAST_WORDS_S)):
            raise EngineDead(self.dead)
        return collected.result()

    def close(self) -> None:
        self._closing.set()
        self.collector.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            with suppress(OSError):  # what was written last may not have gone out
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

    def _tell(self, what: str, *message: Any, hung: Literal["never", "idle", "always"] = "never") -> None:
        if self.dead:
            raise EngineDead(self.dead)
        self._sent += 1
        self._last = Told(self._sent, time.monotonic(), what, hung)
        self._told.append(self._last)
        data = encode(message)
        for socket in self._sockets:
            socket.send(data)

    def _spawn(self, rank: int, world: int, start: bytes) -> subprocess.Popen[bytes]:
        with spared_signals():
            process = subprocess.Popen([sys.executable, "-P", "-m", __name__, str(rank), str(world)],
                                       stdin=subprocess.PIPE)
        process.stdin.write(start)
        process.stdin.flush()
        threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        return process

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing.is_set():
            self._give_up(describe_exit(f"rank {rank}", code))

    def _give_up(self, reason: str) -> None:
        """The first reason counts."""
        if not self.dead:
            self.dead = reason
            log.critical("%s", reason)
            with suppress(OSError):  # closing has removed the folder
                Path(self.directory, FAILED).write_text(reason, "utf-8")
            self.lost.set()

    def _watch_progress(self) -> None:
        """Ask ranks that take long where they are, and end those that hang: of all that owe something, those which came
        least far, as the others may wait for them."""
        while not self._closing.wait(min(1.0, self._patience / 10)) and not self.dead:
            counts = self._progress.counts[1:].copy()
            while self._told and self._told[0].number <= counts[:, 1].min():
                self._told.popleft()
            if self._first_hangs(counts[:, 1].min()) or not self._told or self._told[0].hung == "never":
                continue
            owed, age = self._told[0], time.monotonic() - self._told[0].at
            behind = [rank for rank, count in enumerate(counts.tolist(), 1) if count == min(counts.tolist())]
            if age > self._patience and (owed.hung == "always" or self._work.none()):
                self._end(behind, owed, age)
            elif age > self._patience / 2 and owed.number > self._asked:
                self._asked = owed.number
                self._work.note()
                log.error("%s not finished %s for %.0f s. Where they are:", _names(behind, "has", "have"), owed.what,
                          age)
                self._report()

    def _first_hangs(self, finished: int) -> bool:
        """Whether rank 0 waits for what its device owes it of a step that the others have finished long ago."""
        with suppress(IndexError):  # it owes nothing
            owed = self.owed[0]
            age = time.monotonic() - owed.at
            if owed.number <= finished and age > self._patience:
                self._give_up(f"rank 0 hung: {owed.what}, finished by the other ranks, was not finished within "
                              f"{age:.1f} s (--step-timeout)")
        return bool(self.dead)

    def _end(self, behind: list[int], owed: Told, age: float) -> None:
        begun = all(self._progress.counts[rank, 0] >= owed.number for rank in behind)
        self._give_up(f"{_names(behind, 'hung and was', 'hung and were')} ended: {owed.what}, "
                      f"{'begun' if begun else 'not begun'} there, was not finished within {age:.1f} s "
                      "(--step-timeout)")
        for rank in behind:
            self._processes[rank - 1].kill()

    def _report(self) -> None:
        for process in self._processes:
            with suppress(OSError, ValueError):  # it is gone already
                process.stdin.write(REPORT)
                process.stdin.flush()


def _names(ranks: Sequence[int], one: str, several: str) -> str:
    """"rank 2 has", "ranks 1, 2 have"."""
    listed = ", ".join(map(str, ranks))
    return f"rank {listed} {one}" if len(ranks) == 1 else f"ranks {listed} {several}"


def pack(value: Any) -> Any:
    """A batch as plain lists and bytes; what is done already, as a mask is, is left out."""
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, value.tobytes()]
    return None if value is None or callable(value) else list(map(pack, value))


def unpack(kind: Any, packed: Sequence[Any]) -> Any:
    """The batch, or part of one, that `pack` took apart."""
    fields = {}
    for name, value in zip(kind._fields, packed, strict=True):
        if value is not None and name not in NESTED:
            dtype, shape, data = value
            value = np.frombuffer(bytearray(data), dtype).reshape(shape)
        if value is not None:  # else as by default
            fields[name] = unpack(NESTED[name], value) if name in NESTED else value
    return kind(**fields)


def follow(rank: int, progress: Progress, platform: Any, model: Any, receive: Callable[[], bytes]) -> None:
    """Do what rank 0 tells, until the process ends. A step that fails is logged: rank 0 deals with its requests."""
    state, steps, launched, collector = None, {}, None, ThreadPoolExecutor(1, "collect")
    adapted, placed = {}, None  # steps whose batches name adapters, and what they compute
    while True:
        name, *given = msgspec.msgpack.decode(receive())
        progress.begin(rank)
        if name == "step":
            bucket, batch = None if given[0] is None else Bucket(**given[0]), unpack(Batch, given[1])
            made, kind = (steps, model) if batch.adapters is None else (adapted, placed)
            if bucket not in made:
                made[bucket] = platform.compile(kind.forward, kind.weights, bucket)
            out, state = made[bucket](state, batch)
            launched = collector.submit(collect, out, rank, progress)
            continue
        if launched is not None:
            launched.result()
        if name == "alloc":
            state = None  # before there is a second one
            state = platform.alloc(msgspec.convert(given[0], StateSpec), given[1])
        elif name == "adapters":
            adapted, placed = {}, None  # the old ones go first
            placed = place_as_told(model, platform, given[0])
        else:
            state = platform.copy_pages(state, *given)
        progress.finish(rank)


def collect(out: Any, rank: int, progress: Progress) -> None:
    try:
        out.collect()
    except Exception as error:
        log.error("a step failed here: %s", error)
    progress.finish(rank)


def main(rank: int, world: int) -> None:
    """A rank other than 0, from its configuration on standard input."""
    from ..startup import load_rank
    start = start_worker(Report())
    os.environ[RENDEZVOUS] = start.directory
    set_up_logging(start.config.server)
    socket = read_socket(zmq.Context(), start.directory, f"rank{rank}")
    try:
        follow(rank, Progress(start.directory, world), *load_rank(start.config, rank, world), socket.recv)
    except BaseException as error:  # threads of the platform's may keep a process from ending in order
        log.critical("rank %d: %s", rank, describe(error))
        os._exit(SPOKE)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
