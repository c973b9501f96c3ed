"""Between an engine and the world: hands every input on, keeps the last ones in memory, and writes all to a file."""
from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from ..config import Config, size_bytes
from ..errors import ConfigError
from ..files import named_path
from ..messages import Submit
from ..plan import Batch, Out, StepResult
from ..settings import SECRET
from ..startup import Loaded
from ..version import isthmus_version
from .entries import (
    Aborted,
    Answered,
    Commanded,
    Drafted,
    Entry,
    Failure,
    Memory,
    Now,
    Stepped,
    Submitted,
    pack_result,
    planned,
)
from .file import Header, RecordingFile, check_names

TAIL = 1024      # entries kept in memory: about 250 steps
SHOWN = 40       # of them in a report
_STEP = Stepped()


def make_header(config: Config, loaded: Loaded) -> Header:
    """What a rerun needs to know of an engine. Keys stay out."""
    config = replace(config, server=replace(config.server, **dict.fromkeys(SECRET)))
    return Header(isthmus_version(), msgspec.to_builtins(config), loaded.manifest, loaded.model.config, loaded.sizes,
                  loaded.dtype, loaded.overlap, loaded.model.nbytes, loaded.reason, str(loaded.path))


def check_file(config: Config) -> None:
    """Raises `ConfigError`, before the model loads, where `--record` names what is no place for a recording."""
    if config.scheduler.record is not None:
        check_names(named_path(config.scheduler.record))


def open_file(config: Config, loaded: Loaded) -> RecordingFile | None:
    """The file that `--record` names, None without one. `ConfigError` when it cannot be written."""
    name = config.scheduler.record
    if name is None:
        return None
    try:
        return RecordingFile(named_path(name), make_header(config, loaded), size_bytes(config.scheduler.record_limit))
    except OSError as error:
        raise ConfigError(f"--record {name}: {(error.strerror or str(error)).lower()}") from None


class Recorder:
    """Every input of an engine goes through here, and every plan comes by. One thread calls it; `tail`, `flush` and
    `close` any.

    The tail holds neither prompts nor results, so that a report may be shown to others; the file has all.
    """

    def __init__(self, clock: Callable[[], float], file: RecordingFile | None = None):
        self._clock, self._file = clock, file
        self._writing = threading.Lock()
        self._tail: deque[Entry | str] = deque(maxlen=TAIL)
        self._frame: list[Entry] = []
        self._time = 0.0

    # ---- calls of the engine

    def submitted(self, request: Submit) -> None:
        entry = Submitted(request)
        self._called(entry, str(entry))

    def aborted(self, ids: tuple[str, ...], reason: str) -> None:
        self._called(entry := Aborted(ids, reason), entry)

    def commanded(self, name: str, arguments: dict[str, Any]) -> None:
        self._called(entry := Commanded(name, arguments), entry)

    def stepped(self) -> None:
        self._called(_STEP, _STEP)

    # ---- what comes in during a call, and what is decided

    def now(self) -> float:
        """The clock's time in seconds."""
        self._time = now = self._clock()
        self._add(Now(now))
        return now

    def memory(self, read: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        """(total, free) bytes, as `read` says."""
        found = read()
        self._add(Memory(*found))
        return found

    def grammars(self, make: Callable[[], Any]) -> Any:
        """The library of grammars that `make` makes."""
        return make()

    def answered(self, read: Callable[[], bytes]) -> bytes:
        """What grammars say, by `read`."""
        self._add(Answered(said := read()))
        return said

    def drafter(self, make: Callable[[], Any]) -> Any:
        """The drafter that `make` makes."""
        return make()

    def drafted(self, read: Callable[[], bytes]) -> bytes:
        """What a drafter proposes, by `read`."""
        entry = Drafted(said := read())
        self._tail.append(str(entry))  # the tokens are somebody's text
        if self._file is not None:
            self._frame.append(entry)
        return said

    def launch(self, plan: Any, batch: Batch, cache: Any, run: Callable[[], tuple[Out, Any]]) -> tuple[Out, Any]:
        """`run` the step of a plan: (the step, whose result is recorded when it is collected, and the state)."""
        self._add(planned(plan, batch, cache))
        at = len(self._frame)
        try:
            out, state = run()
        except Exception as error:
            self.failed("launch", error)
            if self._file is not None:  # before what came of the step before, if a mask has asked for that
                self._frame.insert(at, self._frame.pop())
            raise
        return _Collected(out, self), state

    def collected(self, result: StepResult) -> None:
        self._tail.append(f"result of {len(result.tokens)} rows")
        if self._file is not None:
            self._frame.append(pack_result(result))

    def failed(self, where: str, error: Exception) -> None:
        self._add(Failure(where, str(error)))

    # ---- what is told

    def tail(self, count: int = SHOWN) -> str:
        """The last entries for people, one a line."""
        kept, lines, time = list(self._tail)[-count:], [], ""
        for entry in kept:
            if isinstance(entry, Now):
                time = f"{entry.at:.4f} s"
            else:
                lines.append(f"    {time:>14}  {entry}")
        return "\n".join([f"the last {len(lines)} of what entered the engine and what it decided:", *lines])

    def flush(self) -> None:
        """Write all that is known, also of the call that is going on."""
        with self._writing:
            self._flush()

    def close(self) -> None:
        """The recording ends here; may be called twice."""
        with self._writing:
            self._flush()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _flush(self) -> None:
        if self._file is not None:
            frame, self._frame = self._frame, []
            if frame:
                self._file.write(frame)
            self._file.flush()

    def _called(self, entry: Entry, kept: Entry | str) -> None:
        self._tail.append(kept)
        if self._file is not None:
            with self._writing:
                if self._frame and self._file is not None:  # another thread may have closed it
                    self._file.write(self._frame, self._time)
                self._frame = [entry]

    def _add(self, entry: Entry) -> None:
        self._tail.append(entry)
        if self._file is not None:
            self._frame.append(entry)


class _Collected:
    """A launched step that tells the recorder what came of it."""

    __slots__ = ("_out", "_recorder")

    def __init__(self, out: Out, recorder: Recorder):
        self._out, self._recorder = out, recorder

    def collect(self) -> StepResult:
        try:
            result = self._out.collect()
        except Exception as error:
            self._recorder.failed("collect", error)
            raise
        self._recorder.collected(result)
        return result
