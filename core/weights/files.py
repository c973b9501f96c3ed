"""Bytes of checkpoint files: mapped, or parsed as JSON, with limits."""
from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

MAX_JSON = 100_000_000     # bytes; the limit that the safetensors document sets for a header
MAX_JSON_VALUES = 1 << 21  # what those bytes may unfold to


def map_file(path: Path) -> mmap.mmap:
    """The file's bytes, mapped read-only. Raises `CheckpointError` when it is no regular file, unreadable or empty."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist or is not a file")
    try:
        with open(path, "rb") as file:
            if path.stat().st_size == 0:
                raise CheckpointError(f"{path} is empty (0 bytes): download it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises `CheckpointError`, also when it is larger than `MAX_JSON`."""
    with map_file(path) as data:
        if len(data) > MAX_JSON:
            raise CheckpointError(f"{path} has {len(data)} bytes, more than the limit of {MAX_JSON}")
        return parse_json(data[:], str(path))


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object. Raises `CheckpointError` for anything else, a repeated key, more than `MAX_JSON_VALUES` values."""
    if sum(map(text.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise CheckpointError(f"{what} holds more than {MAX_JSON_VALUES} values")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise CheckpointError(f"{what}: the key {twice!r} appears twice")
        return found

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        why = str(error)[:200]
        if "int_max_str_digits" in why:
            why = "it has a number of thousands of digits"
        raise CheckpointError(f"{what} is not valid JSON: {why}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} must be a JSON object, not a {type(value).__name__}")
    return value
