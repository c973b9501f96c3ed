"""Recordings on disk: append-only, bounded, checksummed, for their owner's eyes only.

    MAGIC, then frames: length and CRC-32 of the payload (little-endian uint32 each), payload (msgpack).

The first payload is a `Header`, each other one a list of entries. What is cut off at the end was being written when the
process ended; whatever else does not fit its checksum is an error.
"""
from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ..errors import IsthmusError
from ..models.config import ModelConfig
from ..platform import Manifest
from ..startup import Sizes
from .entries import Entry

log = logging.getLogger(__name__)

MAGIC = b"isthmus recording 1\n"
FRAME = struct.Struct("<II")
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


class RecordingFile:
    """Writes one recording of at most `limit` bytes; when they are used up it ends, and the log says so.

    A file of that name is kept as NAME.1, and so on up to `KEPT`. `OSError` when it cannot be written.
    """

    def __init__(self, path: Path, header: Header, limit: int):
        self.path, self.limit, self.full = path, limit, False
        _make_room(path)
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", FLUSH_BYTES)
        self._file.write(MAGIC)
        self.size, self._flushed = len(MAGIC), 0.0
        self.write(header)
        self.flush()

    def write(self, payload: Any, now: float = 0.0) -> None:
        """Append one frame; `now` (seconds) tells when to hand it to the system."""
        data = _encode(payload)
        self.size += FRAME.size + len(data)
        if self.full or self.size > self.limit:
            return self._end(f"it has {self.limit} bytes (--record-limit)")
        try:
            self._file.write(FRAME.pack(len(data), zlib.crc32(data)) + data)
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
        self._file.close()

    def _end(self, why: str) -> None:
        if not self.full:
            self.full = True
            log.warning("the recording %s ends here, serving goes on: %s", self.path, why)


def _make_room(path: Path) -> None:
    """Rename a file of this name to NAME.1, that to NAME.2, and so on; the oldest goes."""
    names = [path, *(path.with_name(f"{path.name}.{i}") for i in range(1, KEPT + 1))]
    used = next((i for i, name in enumerate(names) if not name.exists()), KEPT)
    for i in range(used, 0, -1):
        os.replace(names[i - 1], names[i])


class Recording:
    """A recording that is read. `cut`: its last frame was being written when the process ended.

    Raises `RecordingError` that names the place for anything that is no recording; nothing is allocated before its size
    is known to be there.
    """

    def __init__(self, path: Path):
        self.path, self.cut = path, False
        try:
            self._file: BinaryIO = open(path, "rb")
        except OSError as error:
            raise RecordingError(f"{path}: {(error.strerror or str(error)).lower()}") from None
        self._left = os.fstat(self._file.fileno()).st_size - len(MAGIC)
        if self._file.read(len(MAGIC)) != MAGIC:
            raise RecordingError(f"{path} is no recording of this version: it does not begin with {MAGIC!r}")
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
        if self._left < FRAME.size:
            self.cut = self._left > 0
            return None
        size, check = FRAME.unpack(self._file.read(FRAME.size))
        self._left -= FRAME.size
        if size > self._left:
            if size > MAX_FRAME:
                raise self._broken(f"a frame of {size} bytes is announced")
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
        return RecordingError(f"{self.path} is broken before byte {self._file.tell()}: {what}")
