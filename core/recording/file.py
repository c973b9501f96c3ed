"""Recordings on disk: append-only, bounded, checksummed, for their owner's eyes only.

    MAGIC, then frames: length of the payload, its CRC-32, CRC-32 of these two (little-endian uint32 each), payload
    (msgpack).

The first payload is a `Header`, each other one a list of entries. A frame whose announced length goes beyond the end
was being written when the process ended; whatever does not fit a checksum, lengths included, is an error.
"""
from __future__ import annotations

import logging
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ..errors import ConfigError, IsthmusError
from ..files import kind_of, open_regular
from ..models.config import ModelConfig
from ..platform import Manifest
from ..startup import Sizes
from .entries import Entry

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

log = logging.getLogger(__name__)

KIND = b"isthmus recording "
MAGIC = KIND + b"2\n"
LENGTHS = struct.Struct("<II")  # of the payload and its CRC-32
CHECK = struct.Struct("<I")     # CRC-32 of these two
HEAD = LENGTHS.size + CHECK.size
MAX_FRAME = 2**28    # bytes; no step is so large
KEPT = 4             # recordings of earlier engines with the same name
FLUSH_S = 0.1        # what is older than this is in the file, whatever ends the process
FLUSH_BYTES = 2**16
_encode = msgspec.msgpack.Encoder().encode


class RecordingError(IsthmusError, ValueError):
    """A file that is no recording, or a broken one."""


class Header(msgspec.Struct, frozen=True):
    """Configuration, sizes and facts of the engine that was recorded; no secret is among them."""

    version: str
    config: dict[str, Any]
    manifest: Manifest
    model: ModelConfig
    sizes: Sizes
    dtype: str
    overlap: bool
    weight_bytes: int
    reason: str
    path: str


def head_of(payload: bytes) -> bytes:
    """What stands before a payload."""
    lengths = LENGTHS.pack(len(payload), zlib.crc32(payload))
    return lengths + CHECK.pack(zlib.crc32(lengths))


class RecordingFile:
    """Writes one recording of at most `limit` bytes; when they are used up it ends, and the log says so.

    A recording of that name is kept as NAME.1, and so on up to `KEPT`. `OSError` when it cannot be written,
    `ConfigError` when one of these names is anything else.
    """

    def __init__(self, path: Path, header: Header, limit: int):
        self.path, self.limit, self.full = path, limit, False
        _make_room(path)
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", FLUSH_BYTES)
        _locked(self._file.fileno())
        self._file.write(MAGIC)
        self.size, self._flushed = len(MAGIC), 0.0
        self.write(header)
        self.flush()

    def write(self, payload: Any, now: float = 0.0) -> None:
        """Append one frame; `now` (seconds) tells when to hand it to the system."""
        data = _encode(payload)
        self.size += HEAD + len(data)
        if self.full or self.size > self.limit:
            return self._end(f"it has {self.limit} bytes (--record-limit)")
        try:
            self._file.write(head_of(data) + data)
            if now - self._flushed > FLUSH_S:
                self._flushed = now
                self._file.flush()
        except OSError as error:  # such as a full disk: serving goes on
            self._end(str(error))

    def flush(self) -> None:
        """Hand everything to the system."""
        try:
            self._file.flush()
        except OSError as error:
            self._end(str(error))

    def close(self) -> None:
        """Flush and close; may be called twice."""
        self.flush()
        with suppress(OSError):  # what cannot be written is told by `flush`
            self._file.close()

    def _end(self, why: str) -> None:
        if not self.full:
            self.full = True
            log.warning("the recording %s ends here, serving goes on: %s", self.path, why)


def check_names(path: Path) -> list[Path]:
    """The names that a recording at `path` moves when it begins: its own, NAME.1, ... that exist, newest first.

    Raises `ConfigError` where one of them is anything but a recording, or another process is writing it: a device, a
    folder or a model must never be moved.
    """
    names = []
    for i in range(KEPT + 1):
        name = path.with_name(f"{path.name}.{i}") if i else path
        try:
            mode = name.lstat().st_mode
            what = _kept_apart(name) if stat.S_ISREG(mode) else f"{kind_of(mode)}, which is left alone"
        except FileNotFoundError:
            break
        except OSError as error:
            raise ConfigError(f"--record {path}: {(error.strerror or str(error)).lower()}") from None
        if what:
            whose = f": {name}, a name of earlier recordings," if i else ""
            raise ConfigError(f"--record {path}{whose} is {what}: name another file")
        names.append(name)
    return names


def _kept_apart(path: Path) -> str:
    """What a regular file is that must not be moved, "" for a recording, and for a file without anything in it."""
    with open_regular(path) as file:
        begin = file.read(len(MAGIC))
        if begin and not begin.startswith(KIND):
            return "a file that is no recording"
        return "" if _locked(file.fileno()) else "the recording of a server that is running"


def _locked(descriptor: int) -> bool:
    """Lock the file for as long as it is open. False if another process has."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def _make_room(path: Path) -> None:
    """Rename a file of this name to NAME.1, that to NAME.2, and so on; the oldest goes."""
    names = check_names(path)
    for i in range(min(len(names), KEPT), 0, -1):
        os.replace(names[i - 1], path.with_name(f"{path.name}.{i}"))


class Recording:
    """A recording that is read. `cut`: its last frame was being written when the process ended.

    Raises `RecordingError` that names the place for anything that is no recording; nothing is allocated before its size
    is known to be there.
    """

    def __init__(self, path: Path):
        self.path, self.cut = path, False
        try:
            self._file: BinaryIO = open_regular(path)
        except OSError as error:
            raise RecordingError(f"{path}: {(error.strerror or str(error)).lower()}") from None
        except ValueError as error:
            raise RecordingError(f"{path}: {error}") from None
        self._at = len(MAGIC)
        self._left = os.fstat(self._file.fileno()).st_size - len(MAGIC)
        if (begin := self._file.read(len(MAGIC))) != MAGIC:
            raise RecordingError(_other_kind(path, begin))
        header = self._frame()
        if header is None:
            raise RecordingError(f"{path} ends before its first step")
        self.header = self._decode(header, Header)

    def entries(self) -> Iterator[Entry]:
        """All entries, once."""
        decoder = msgspec.msgpack.Decoder(list[Entry])
        while (data := self._frame()) is not None:
            yield from self._decode(data, list[Entry], decoder)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _frame(self) -> bytes | None:
        """The next payload, None at the end."""
        self._at = self._file.tell()
        if self._left < HEAD:
            self.cut = self._left > 0
            return None
        lengths, own = self._file.read(LENGTHS.size), self._file.read(CHECK.size)
        self._left -= HEAD
        if CHECK.pack(zlib.crc32(lengths)) != own:
            raise self._broken("the checksum of a length is another")
        size, check = LENGTHS.unpack(lengths)
        if size > MAX_FRAME:
            raise self._broken(f"a frame of {size} bytes is announced")
        if size > self._left:
            self.cut = True
            return None
        data = self._file.read(size)
        self._left -= size
        if zlib.crc32(data) != check:
            raise self._broken("the checksum is another")
        return data

    def _decode(self, data: bytes, kind: Any, decoder: Any = None) -> Any:
        try:
            return decoder.decode(data) if decoder else msgspec.msgpack.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise self._broken(str(error)) from None

    def _broken(self, what: str) -> RecordingError:
        return RecordingError(f"{self.path} is broken at byte {self._at}: {what}")


def _other_kind(path: Path, begin: bytes) -> str:
    if not begin:
        return f"{path} is empty: the engine that was to write it could not, or has not begun"
    if begin.startswith(KIND) and begin.endswith(b"\n"):
        theirs, ours = (text.removeprefix(KIND).strip().decode("ascii", "replace") for text in (begin, MAGIC))
        return (f"{path} is a recording of form {theirs}, this version of Isthmus reads form {ours}: run it again with "
                "the version that made it")
    return (f"{path} is no recording, which begins with the words {KIND.decode().strip()!r}: `isthmus serve --record "
            "FILE` writes one, and a trace of requests is for `isthmus replay`")
