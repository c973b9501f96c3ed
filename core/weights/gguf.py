"""GGUF files, version 2 and 3, little-endian: metadata and the place of each tensor.

Nothing in the file is believed: every count, length, type and offset is checked against the file's size, and against
the limits below, before anything is allocated for it. Source: the GGUF document of the ggml project.
"""
from __future__ import annotations

import mmap
import re
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError, shown
from ..quant.formats import GGUF_TYPES, GGUF_UNREAD, nbytes
from .files import map_file

MAX_KEYS = 1 << 16         # metadata entries in one file
MAX_TENSORS = 1 << 17      # tensors in one file
MAX_ELEMENTS = 1 << 22     # array elements in all metadata of one file; the largest vocabularies need about a million
MAX_NESTED = 1 << 12       # arrays in one array
MAX_STRING = 1 << 26       # bytes in one string
MAX_KEY = (1 << 16) - 1    # bytes in a metadata key, by the document
MAX_DEPTH = 4              # arrays inside arrays
MAX_DIMS = 4
MAX_SPLITS = 1024

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1", 10: "<u8", 11: "<i8",
            12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SPLIT = re.compile(r"(?P<base>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")


class TensorInfo(NamedTuple):
    """Logical shape (last axis contiguous: the reverse of GGUF's order), format, and byte offset in the file."""

    shape: tuple[int, ...]
    dtype: str
    offset: int


class GGUF:
    """A parsed file. `metadata` holds Python values (arrays are lists); `tensors` name -> `TensorInfo`.

    `map` is the read-only mapping of the file; views of it stay valid after `close`, which only drops this reference.
    """

    def __init__(self, path: Path, map: mmap.mmap, metadata: dict[str, Any], tensors: dict[str, TensorInfo]):
        self.path, self.map, self.metadata, self.tensors = path, map, metadata, tensors

    def __repr__(self) -> str:
        return f"GGUF({str(self.path)!r}, {len(self.metadata)} keys, {len(self.tensors)} tensors)"


class _Reader:
    """A cursor over the mapping that refuses to pass the end."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.size, self.pos, self.elements = path, data, len(data), 0, 0

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what} (at byte {self.pos} of {self.size})")

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.pos:
            raise self.fail(f"{what} needs {count} bytes, {self.size - self.pos} are left: the file is cut short")

    def integer(self, layout: struct.Struct, what: str) -> int:
        self.need(layout.size, what)
        (value,) = layout.unpack_from(self.data, self.pos)
        self.pos += layout.size
        return value

    def count(self, what: str, each: int, limit: int) -> int:
        """A u64 that counts things of at least `each` bytes."""
        value = self.integer(_U64, what)
        if value > limit:
            raise self.fail(f"{what} is {value}, more than the limit of {limit}")
        self.need(value * each, f"{what} {value}")
        return value

    def string(self, what: str, limit: int = MAX_STRING) -> str:
        length = self.count(f"length of {what}", 1, limit)
        raw = self.data[self.pos:self.pos + length]
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {raw[:40]!r}") from error
        self.pos += length
        return text

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings: the one long loop of a vocabulary, so it is kept tight."""
        data, unpack, size, pos, out = self.data, _U64.unpack_from, self.size, self.pos, []
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + unpack(data, pos)[0]
                if pos > size or pos - start > MAX_STRING:
                    raise self.fail(f"string {len(out)} of {what} has length {pos - start}")
                out.append(data[start:pos].decode())
        except struct.error as error:
            raise self.fail(f"{what} ends after {len(out)} of {count} strings: the file is cut short") from error
        except UnicodeDecodeError as error:
            raise self.fail(f"string {len(out)} of {what} is not UTF-8") from error
        self.pos = pos
        return out

    def numbers(self, kind: int, count: int, what: str) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        self.need(count * dtype.itemsize, what)
        values = np.frombuffer(self.data, dtype, count, self.pos)
        if kind == _BOOL:
            if (values > 1).any():
                raise self.fail(f"{what} is a boolean with a value other than 0 and 1")
            values = values.astype(bool)
        self.pos += count * dtype.itemsize
        return values.tolist()

    def array(self, what: str, depth: int) -> list[Any]:
        if depth > MAX_DEPTH:
            raise self.fail(f"{what} nests arrays more than {MAX_DEPTH} deep")
        kind = self.integer(_U32, f"element type of {what}")
        if kind in _SCALARS:
            each = np.dtype(_SCALARS[kind]).itemsize
        elif kind in (_STRING, _ARRAY):
            each = 8 if kind == _STRING else 12
        else:
            raise self.fail(f"{what} has elements of the unknown type {kind}")
        limit = MAX_NESTED if kind == _ARRAY else MAX_ELEMENTS - self.elements
        count = self.count(f"array length of {what}", each, limit)
        self.elements += count
        if kind == _STRING:
            return self.strings(count, what)
        if kind == _ARRAY:
            return [self.array(what, depth + 1) for _ in range(count)]
        return self.numbers(kind, count, what)

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what, 1)
        if kind not in _SCALARS:
            raise self.fail(f"{what} has the unknown type {kind}")
        return self.numbers(kind, 1, what)[0]


def _header(reader: _Reader) -> tuple[int, int]:
    """Numbers of tensors and metadata entries."""
    reader.need(4, "the magic number")
    if reader.data[:4] != b"GGUF":
        raise reader.fail(f"not a GGUF file: it starts with {reader.data[:4]!r}")
    reader.pos = 4
    version = reader.integer(_U32, "the version")
    if version in (2 << 24, 3 << 24):
        raise reader.fail("big-endian GGUF is not supported: convert the file to little-endian")
    if version not in (2, 3):
        raise reader.fail(f"GGUF version {version} is not supported: versions 2 and 3 are; convert the model again")
    # The smallest tensor entry: an empty name, no dimensions, type, offset. The smallest metadata entry: one byte.
    tensors = reader.count("number of tensors", 24, MAX_TENSORS)
    return tensors, reader.count("number of metadata entries", 13, MAX_KEYS)


def _metadata(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = reader.string("a metadata key", MAX_KEY)
        if key in metadata:
            raise reader.fail(f"metadata key {key!r} appears twice")
        metadata[key] = reader.value(reader.integer(_U32, f"type of {key!r}"), f"metadata {key!r}")
    return metadata


def _tensor(reader: _Reader) -> tuple[str, TensorInfo]:
    """One tensor entry; its offset is still relative to the data section."""
    name = reader.string("a tensor name", MAX_KEY)
    dims = reader.integer(_U32, f"number of dimensions of {name!r}")
    if dims > MAX_DIMS:
        raise reader.fail(f"tensor {name!r} has {dims} dimensions, at most {MAX_DIMS} are allowed")
    shape = tuple(reader.integer(_U64, f"shape of {name!r}") for _ in range(dims))[::-1]
    kind = reader.integer(_U32, f"type of {name!r}")
    if kind not in GGUF_TYPES:
        known = ", ".join(GGUF_TYPES.values())
        raise reader.fail(f"tensor {name!r} has the type {kind} ({GGUF_UNREAD.get(kind, 'unknown')}), which is not "
                          f"supported: use a file quantized to one of {known}")
    return name, TensorInfo(shape, GGUF_TYPES[kind], reader.integer(_U64, f"offset of {name!r}"))


def _place(reader: _Reader, tensors: dict[str, TensorInfo], alignment: int) -> dict[str, TensorInfo]:
    """Tensors with absolute offsets, each whole inside the file, aligned, and over bytes of its own."""
    base = -(-reader.pos // alignment) * alignment
    placed, ranges = {}, []
    for name, info in tensors.items():
        try:
            size = nbytes(info.dtype, info.shape)
        except ValueError as error:
            raise reader.fail(f"tensor {name!r}: {error}") from error
        begin = base + info.offset
        if info.offset % alignment:
            raise reader.fail(f"tensor {name!r} at offset {info.offset} is not aligned to {alignment} bytes")
        if begin + size > reader.size:
            raise reader.fail(f"tensor {name!r} of shape {info.shape} takes bytes {begin} to {begin + size}, past the "
                              "end of the file: it is cut short or damaged, download it again")
        placed[name] = info._replace(offset=begin)
        if size:
            ranges.append((begin, begin + size, name))
    ranges.sort()
    for (_, end, first), (begin, _, second) in pairwise(ranges):
        if begin < end:
            raise reader.fail(f"tensors {first!r} and {second!r} overlap in bytes {begin} to {end}")
    return placed


def read_gguf(path: str | Path) -> GGUF:
    """Parse one GGUF file (one part of a split one). Raises `CheckpointError` saying what is wrong and where."""
    path = Path(path)
    data = map_file(path)
    reader = _Reader(path, data)
    n_tensors, n_keys = _header(reader)
    metadata = _metadata(reader, n_keys)
    tensors: dict[str, TensorInfo] = {}
    for _ in range(n_tensors):
        name, info = _tensor(reader)
        if name in tensors:
            raise reader.fail(f"tensor {name!r} appears twice")
        tensors[name] = info
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise reader.fail(f"general.alignment is {shown(alignment)}, not a power of two from 8 to {1 << 20}")
    return GGUF(path, data, metadata, _place(reader, tensors, alignment))


def split_paths(path: Path) -> list[Path]:
    """All parts of the split model that `path` is a part of, in order; `[path]` when its name is not of a split."""
    match = _SPLIT.fullmatch(path.name)
    if not match:
        return [path]
    count = int(match["count"])
    if not 1 <= count <= MAX_SPLITS or not 1 <= int(match["no"]) <= count:
        raise CheckpointError(f"{path.name} is not a possible part of a split model (at most {MAX_SPLITS} parts)")
    return [path.with_name(f"{match['base']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def read_split(path: str | Path) -> list[GGUF]:
    """All parts of a model, whichever part was named; the first holds the metadata.

    Raises `CheckpointError` for a missing part, parts that do not belong together, or a tensor in two parts.
    """
    paths = split_paths(Path(path))
    missing = [p.name for p in paths if not p.is_file()]
    if missing and len(paths) > 1:
        raise CheckpointError(f"{path} is one of {len(paths)} parts, missing beside it: {', '.join(missing[:4])}")
    parts = [read_gguf(p) for p in paths]
    count = parts[0].metadata.get("split.count", 0)
    if count not in (0, 1, len(parts)):
        raise CheckpointError(f"{parts[0].path} says it is one of {shown(count)} parts, but its name does not: give "
                              "the parts names that end in -00001-of-0000N.gguf")
    seen: dict[str, Path] = {}
    for i, part in enumerate(parts):
        if len(parts) > 1 and (part.metadata.get("split.no"), part.metadata.get("split.count")) != (i, len(parts)):
            raise CheckpointError(f"{part.path} says it is part {shown(part.metadata.get('split.no'))} (from 0) of "
                                  f"{shown(part.metadata.get('split.count'))}, its name says {i} of {len(parts)}")
        for name in part.tensors:
            if name in seen:
                raise CheckpointError(f"tensor {name!r} is in {seen[name].name} and in {part.path.name}")
            seen[name] = part.path
    total = parts[0].metadata.get("split.tensors.count", len(seen))
    if total != len(seen):
        raise CheckpointError(f"{parts[0].path}: {shown(total)} tensors are announced, the parts hold {len(seen)}")
    return parts
