"""Safetensors files: headers, checked before anything in them is believed, and the files of a sharded model.

Source: the format section of the safetensors project: a u64 with the length of the header, a JSON header of at most
100 MB, then a byte buffer that is indexed without holes and without overlaps.
"""
from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..files import is_there
from ..quant.formats import SAFETENSORS_TYPES, nbytes
from .files import MAX_JSON, map_file, parse_json, read_json

MAX_DIMS = 8
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Entry(NamedTuple):
    """One tensor: dtype as the file spells it ("BF16"), logical shape, byte range from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafeTensors(NamedTuple):
    """An opened file: its mapping, where the byte buffer starts, and its tensors by name."""

    path: Path
    map: mmap.mmap
    base: int
    tensors: dict[str, Entry]


def read_safetensors_header(path: str | Path) -> dict[str, Entry]:
    """Tensors of one file, name -> (dtype, shape, begin, end). Raises `CheckpointError` saying what is wrong."""
    return open_safetensors(path).tensors


def open_safetensors(path: str | Path) -> SafeTensors:
    """Map one file and check its header. Raises `CheckpointError`."""
    path = Path(path)
    data = map_file(path)
    if len(data) < 8:
        raise CheckpointError(f"{path} has {len(data)} bytes, too few for a safetensors file: download it again")
    (length,) = struct.unpack_from("<Q", data)
    if not 2 <= length <= min(MAX_JSON, len(data) - 8):
        raise CheckpointError(f"{path}: the header's length is {length}, with {len(data) - 8} bytes after it and a "
                              f"limit of {MAX_JSON}: not a safetensors file, or cut short")
    header = parse_json(data[8:8 + length], f"{path}: header")
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings")
    tensors = {name: _entry(f"{path}: tensor {name!r}", value) for name, value in header.items()}
    _check_cover(path, tensors, len(data) - 8 - length)
    return SafeTensors(path, data, 8 + length, tensors)


def _entry(where: str, value: Any) -> Entry:
    """One header value, with its shape equal to its byte range."""
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_TYPES:
        raise CheckpointError(f"{where} has dtype {str(dtype)[:40]!r}; supported: {', '.join(SAFETENSORS_TYPES)}")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or len(numbers) > MAX_DIMS or \
                not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
            raise CheckpointError(f"{where}: {what} must be a list of at most {MAX_DIMS} integers from 0 up")
    size = nbytes(SAFETENSORS_TYPES[dtype], shape)
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise CheckpointError(f"{where} has data_offsets {offsets}, but {dtype} of shape {shape} takes {size} bytes")
    return Entry(dtype, tuple(shape), *offsets)


def _check_cover(path: Path, tensors: Mapping[str, Entry], size: int) -> None:
    """The byte ranges follow each other without hole or overlap and end with the file."""
    at, last = 0, "the header"
    for name, entry in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if entry.begin != at:
            raise CheckpointError(f"{path}: tensor {name!r} begins at byte {entry.begin}, but {last} ends at {at}: "
                                  "tensors overlap or leave a hole")
        at, last = entry.end, f"tensor {name!r}"
    if at != size:
        raise CheckpointError(f"{path}: the tensors take {at} bytes, the file holds {size}: it is cut short, or "
                              "has bytes that belong to no tensor")


def open_model(folder: Path) -> list[tuple[str, SafeTensors]]:
    """Every tensor of the model in `folder` with the file that holds it: one file, or the shards of its index.

    Raises `CheckpointError` for a missing shard, a shard outside the folder, or a tensor that its shard lacks.
    """
    single = folder / SINGLE
    if not single.exists() and (folder / INDEX).exists():
        return _open_sharded(folder)
    others = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
    if not single.exists():
        if len(others) != 1:
            raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}" +
                                  (f", and {len(others)} other .safetensors files" if others else ""))
        single = others[0]
    file = open_safetensors(single)
    return [(name, file) for name in file.tensors]


def _open_sharded(folder: Path) -> list[tuple[str, SafeTensors]]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX}: weight_map must map tensor names to file names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if PurePosixPath(name).name != name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{folder / INDEX} names the shard {name!r}, not a .safetensors file beside it")
    missing = [name for name in names if not (is_there(folder / name) and (folder / name).is_file())]
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} of {len(names)} shards: {', '.join(missing[:4])}: "
                              "download the model again")
    shards = {name: open_safetensors(folder / name) for name in names}
    for tensor, shard in weight_map.items():
        if tensor not in shards[shard].tensors:
            raise CheckpointError(f"{folder / INDEX} places tensor {tensor!r} in {shard}, which does not have it")
    return [(tensor, shards[shard]) for tensor, shard in weight_map.items()]
