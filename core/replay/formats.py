"""Trace files: Mooncake and plain JSONL, Azure CSV, the binary form, and turn lengths of conversations."""
from __future__ import annotations

import csv
import io
import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import shown
from ..files import open_regular
from ..recording.file import KIND as RECORDING
from .trace import MAX_TOKENS, Trace, TraceError, make_trace

Row = tuple[float, int, int, object, Any, bool]

MAGIC = 0x4B56
MAX_BYTES = 4 << 30
PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}
BLOCK = 16                                # tokens in a block where a trace gives tokens or texts
BLOCKS = (512, 16, 64, 32, 128, 256, 1)   # sizes that are tried where a trace gives hashes only
TEXT_BYTES = 4                            # bytes of a text that count as a token
RECORD = np.dtype([("arrival", "<f8"), ("space", "<i4"), ("inputs", "<i4"), ("blocks", "<i4")])
_TIMES = ("arrival", "timestamp", "arrival_time", "time", "t")
_TOKENS = ("prompt", "tokens", "token_ids", "prompt_token_ids", "input_ids", "text")
_HASHES = ("hash_ids", "block_ids", "block_hashes", "blocks")
_INPUTS = ("input_length", "input_tokens", "prompt_tokens", "context_tokens")
_OUTPUTS = ("output_length", "output_tokens", "completion_tokens", "max_tokens", "generated_tokens")


def read_trace(path: Path, block: int | None = None, seed: int = 0) -> Trace:
    """The trace in a file, whatever its form. block: tokens in a block, where the file does not say it.

    Raises `TraceError` that names the line and the field.
    """
    data = _bytes(path)
    if data[:4] == struct.pack("<i", MAGIC):
        return replace(_read_binary(path, data), form="binary")
    if data.startswith(RECORDING):
        raise TraceError(f"{path}: a recording of an engine's steps, no trace of requests: isthmus rerun {path}")
    for begin, packer in PACKED.items():
        if data.startswith(begin):
            raise TraceError(f"{path}: it is packed by {packer}: unpack it first")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: neither a binary trace (its first four bytes are not 0x{MAGIC:x}) "
                         f"nor UTF-8 text (byte {error.start})") from error
    head = text.lstrip()[:1]
    if head == "{":
        return _read_jsonl(path, text, block, seed)
    if head:
        return replace(_read_azure(path, text, block), form="Azure CSV")
    raise TraceError(f"{path}: the file is empty")


def _bytes(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_BYTES:
                raise TraceError(f"{path}: {size} bytes, at most {MAX_BYTES} are read")
            return file.read(size)
    except FileNotFoundError:
        raise TraceError(f"{path}: there is no such file") from None
    except OSError as error:
        raise TraceError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from None


def write_binary(trace: Trace, path: Path) -> None:
    """The trace in the binary form: numbers of prefixes as ids. Output lengths and hints have no place in it."""
    head = np.zeros(len(trace), RECORD)
    head["arrival"], head["inputs"], head["blocks"] = trace.arrival, trace.inputs, np.diff(trace.starts)
    with path.open("wb") as file:
        file.write(struct.pack("<4i", MAGIC, len(trace), trace.block, 1))
        file.write(head.tobytes() + trace.blocks.astype("<i8").tobytes())


def write_jsonl(trace: Trace, path: Path) -> None:
    """The trace as plain JSONL, which keeps all there is."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(len(trace)):
            row = {"arrival": round(float(trace.arrival[i]), 6), "input_tokens": int(trace.inputs[i]),
                   "output_tokens": int(trace.outputs[i]), "block": trace.block, "blocks": trace.request(i).tolist()}
            file.write(json.dumps(row | ({"ends": True} if trace.hinted[i] else {})) + "\n")


def _read_binary(path: Path, data: bytes) -> Trace:
    if len(data) < 16:
        raise TraceError(f"{path}: {len(data)} bytes are no header of a binary trace, which has 16")
    _, count, block, flag = struct.unpack("<4i", data[:16])
    if flag not in (0, 1):
        raise TraceError(f"{path}: the last number of its header is {flag}, neither 0 nor 1")
    at = 16 + count * RECORD.itemsize
    if count < 1 or block < 1 or at > len(data):
        raise TraceError(f"{path}: the header says {count} requests in blocks of {block} tokens, "
                         f"the file has {len(data)} bytes")
    head = np.frombuffer(data, RECORD, count, 16)
    starts = np.concatenate([[0], np.cumsum(head["blocks"], dtype=np.int64)])
    if (head["blocks"] < 0).any() or (head["inputs"] < 0).any() or at + 8 * int(starts[-1]) != len(data):
        raise TraceError(f"{path}: its requests have {int(starts[-1])} blocks, {len(data) - at} bytes of ids follow")
    ids = np.frombuffer(data, "<i8", int(starts[-1]), at)
    rows = ((float(h["arrival"]), int(h["inputs"]), 0, int(h["space"]), ids[starts[i]:starts[i + 1]], False)
            for i, h in enumerate(head))
    return make_trace(path.name, block, rows)


def _read_azure(path: Path, text: str, block: int | None) -> Trace:
    """TIMESTAMP,ContextTokens,GeneratedTokens: lengths only, so that no two prompts share anything."""
    reader = csv.DictReader(io.StringIO(text))
    try:
        names = {name.strip().lower(): name for name in reader.fieldnames or ()}
    except csv.Error as error:
        raise TraceError(f"{path}: line 1: {error}") from error
    lacking = [n for n in ("TIMESTAMP", "ContextTokens", "GeneratedTokens") if n.lower() not in names]
    if lacking:
        raise TraceError(f"{path}: neither JSON lines nor a CSV file with a column {lacking[0]}; "
                         f"its first line is {text.splitlines()[0][:80]!r}")
    size, number = block or BLOCK, 0
    rows: list[Row] = []
    try:
        for row in reader:
            at = (row[names["timestamp"]] or "").strip()
            seconds = float(at) if at.replace(".", "", 1).isdigit() else datetime.fromisoformat(at[:26]).timestamp()
            tokens, out = (_counted(row[names[name]], names[name].strip())
                           for name in ("contexttokens", "generatedtokens"))
            rows.append((seconds, tokens, out, "", range(number, number + tokens // size), False))
            number += tokens // size
    except (ValueError, AttributeError, TypeError, OverflowError, OSError, csv.Error) as error:
        raise TraceError(f"{path}: line {reader.line_num}: {error}") from error
    return make_trace(path.name, size, rows)


def _counted(text: str | None, column: str) -> int:
    if not text or not text.strip().isdecimal():
        raise ValueError(f"its {column} is {shown(text)}, no number of tokens")
    return _count(int(text), f"its {column}")


def _read_jsonl(path: Path, text: str, block: int | None, seed: int) -> Trace:
    rows = []
    for line, part in enumerate(text.split("\n"), 1):  # other ends of lines may stand in a text
        if part.strip():
            try:
                rows.append(json.loads(part))
            except (ValueError, RecursionError) as error:
                raise TraceError(f"{path}: line {line} is no JSON: {error}") from error
            if not isinstance(rows[-1], dict):
                raise TraceError(f"{path}: line {line} is no object: {part[:60]!r}")
    if "turns" in rows[0]:
        return replace(_conversations(path, rows, block or BLOCK, seed), form="JSON lines of turns")
    if any(name in rows[0] for name in _HASHES):
        size = block or _stated(path, rows) or (_block_size(path, rows) if "hash_ids" in rows[0] else BLOCK)
        form, trace = "blocks", make_trace(path.name, size, _each(path, rows, lambda row: _hashed(row, size)))
        if "hash_ids" in rows[0]:
            form = f"blocks as {'Qwen' if 'chat_id' in rows[0] else 'Mooncake'}'s traces have them"
    else:
        size = block or _stated(path, rows) or BLOCK
        form, trace = "prompts", make_trace(path.name, size, _each(path, rows, lambda row: _spelled(row, size)))
    return replace(trace, form=f"JSON lines of {form}")


def _each(path: Path, rows: list[dict], convert: Callable[[dict], Any], what: str = "request") -> Iterator[Any]:
    for number, row in enumerate(rows, 1):
        try:
            yield convert(row)
        except (KeyError, ValueError, TypeError, OverflowError) as error:
            said = f"it has no field {error.args[0]}" if isinstance(error, KeyError) else str(error)
            raise TraceError(f"{path}: {what} {number}: {said}") from error


def _stated(path: Path, rows: list[dict]) -> int | None:
    """Tokens in a block as the rows say, all the same; None where the first says nothing."""
    first = rows[0].get("block", rows[0].get("block_size"))
    for number, row in enumerate(rows, 1):
        size = row.get("block", row.get("block_size", first))
        if size is not None and (type(size) is not int or not 0 < size < MAX_TOKENS):
            raise TraceError(f"{path}: request {number}: its block is {shown(size)}, no number of tokens above 0")
        if size != first:
            raise TraceError(f"{path}: request {number}: its block is {size}, that of the first request "
                             f"{'not said' if first is None else first}")
    return first


def _block_size(path: Path, rows: list[dict]) -> int:
    """The size at which every request's tokens fill its hashes, the last perhaps in part."""
    told = [(row.get("input_length"), row.get("hash_ids")) for row in rows[:1000]]
    for number, (tokens, _) in enumerate(told, 1):
        if tokens is not None:
            try:
                _count(tokens, "its input")
            except ValueError as error:
                raise TraceError(f"{path}: request {number}: {error}") from None
    if all(type(tokens) is int and isinstance(hashes, list) for tokens, hashes in told):
        for size in BLOCKS:
            if all(-(-tokens // size) == len(hashes) for tokens, hashes in told):
                return size
    raise TraceError(f"{path}: no usual block size ({', '.join(map(str, BLOCKS))} tokens) fits input_length and "
                     "hash_ids: say it with --block-tokens")


def _field(row: dict, names: tuple[str, ...], default: Any = None) -> Any:
    for name in names:
        if name in row:
            return row[name]
    if default is not None:
        return default
    raise KeyError(" or ".join(names))


def _seconds(row: dict) -> float:
    """Mooncake's `timestamp` is in milliseconds and stands beside `hash_ids` alone; all others are seconds."""
    at = float(_field(row, _TIMES))
    return at / 1000 if "timestamp" in row and "hash_ids" in row and "chat_id" not in row else at


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < MAX_TOKENS:
        raise ValueError(f"{what} is {shown(value)}, no number from 0 to {MAX_TOKENS - 1}")
    return value


def _listed(value: Any, kinds: set[type], what: str) -> list:
    """The list, whose entries have one of these types. Raises `ValueError` for anything else."""
    if not isinstance(value, list):
        raise ValueError(f"{what} are {shown(value)}, no list")
    if not set(map(type, value)) <= kinds:
        wrong = next(entry for entry in value if type(entry) not in kinds)
        raise ValueError(f"{shown(wrong)} is among {what}")
    return value


def _ends(row: dict) -> bool:
    ends = row.get("ends", False)
    if not isinstance(ends, bool):
        raise ValueError(f"its ends is {shown(ends)}, neither true nor false")
    return ends


def _hashed(row: dict, size: int) -> Row:
    hashes = _listed(_field(row, _HASHES), {int, str}, "its blocks")
    tokens = _count(_field(row, _INPUTS, len(hashes) * size), "its input")
    if len(hashes) > -(-tokens // size):
        raise ValueError(f"{len(hashes)} blocks of {size} tokens are more than a prompt of {tokens} tokens has")
    return (_seconds(row), tokens, _count(_field(row, _OUTPUTS, 1), "its output"), str(row.get("namespace", "")),
            hashes[:tokens // size], _ends(row))


def _spelled(row: dict, size: int) -> Row:
    """A prompt as token ids, or as text, of which four bytes count as a token."""
    prompt = _field(row, _TOKENS)
    if isinstance(prompt, str):
        data, step = prompt.encode("utf-8", "surrogatepass"), size * TEXT_BYTES
        tokens = -(-len(data) // TEXT_BYTES)
    else:
        if _listed(prompt, {int}, "its tokens") and not 0 <= min(prompt) <= max(prompt) < MAX_TOKENS:
            raise ValueError(f"its tokens go from {shown(min(prompt))} to {shown(max(prompt))}, from 0 to "
                             f"{MAX_TOKENS - 1} are allowed")
        data, step, tokens = np.array(prompt, "<i4").tobytes(), size * 4, len(prompt)
    blocks = [data[i * step:(i + 1) * step] for i in range(tokens // size)]
    return (_seconds(row), tokens, _count(_field(row, _OUTPUTS, 1), "its output"), str(row.get("namespace", "")),
            blocks, _ends(row))


def _turns(row: dict) -> list[tuple[bool, int]]:
    """(does the user speak?, characters) of each turn."""
    turns = []
    for number, turn in enumerate(_listed(row["turns"], {list}, "its turns"), 1):
        if len(turn) < 2 or not isinstance(turn[0], str):
            raise ValueError(f"turn {number} is {shown(turn)}, not who speaks and a number of characters")
        turns.append((turn[0] == "u", _count(turn[1], f"the length of turn {number}")))
    return turns


def _conversations(path: Path, rows: list[dict], size: int, seed: int) -> Trace:
    """Lengths of turns become requests: conversations begin 1.4 a second, people think 45 s (both exponential).

    A request holds all turns before it; four characters are a token; nothing is shared between conversations.
    """
    draw, begin, made = np.random.default_rng(seed), 0.0, []
    for number, turns in enumerate(_each(path, rows, _turns, "conversation")):
        begin += draw.exponential(1 / 1.4)
        at, tokens = begin, 0
        for i, (asks, characters) in enumerate(turns):
            if asks:
                reply = turns[i + 1][1] if i + 1 < len(turns) else 0
                total = -(-(tokens + characters) // 4)
                if total >= MAX_TOKENS:
                    raise TraceError(f"{path}: conversation {number + 1}: up to turn {i + 1} it has {total} tokens, "
                                     f"fewer than {MAX_TOKENS} are allowed")
                made.append((at, total, -(-reply // 4), number, range(total // size), False))
                at += draw.exponential(45.0)
            tokens += characters
    return make_trace(path.name, size, made)
