"""The entries of a recording in the order in which they happened: calls, what came in during them, and decisions.

A call is `Submitted`, `Aborted`, `Commanded` or `Stepped`. `Now`, `Memory`, `Result`, `Answered` and `Failure`
came in from outside; `Planned` is what the scheduler decided, and what a rerun is compared with.
"""
from __future__ import annotations

import zlib
from typing import Any

import msgspec
import numpy as np

from ..messages import Submit, pack_ids, unpack_ids
from ..plan import Batch, StepResult

SHOWN_CHUNKS = 6  # prefill chunks of a step in a line for people
SLOT_BYTES = np.dtype(np.intp).itemsize


class Submitted(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """A request came. Its prompt is needed to run it again."""

    request: Submit

    def __str__(self) -> str:
        p = self.request.params
        return (f"submit {self.request.id}: {len(self.request.prompt) // 4} prompt tokens, at most {p.max_tokens} more"
                + (f", priority {self.request.priority}" if self.request.priority else ""))


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Requests were to end."""

    ids: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"end {', '.join(self.ids)}: {self.reason}"


class Commanded(msgspec.Struct, frozen=True, array_like=True, tag="command"):
    """An administrative call."""

    name: str
    arguments: dict[str, str | float] = {}

    def __str__(self) -> str:
        return " ".join(["command", self.name, *(f"{name}={value}" for name, value in self.arguments.items())])


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """`EngineCore.step` was called."""

    def __str__(self) -> str:
        return "step"


class Now(msgspec.Struct, frozen=True, array_like=True, tag="now"):
    """What the clock said, in seconds."""

    at: float

    def __str__(self) -> str:
        return f"clock {self.at:.6f} s"


class Memory(msgspec.Struct, frozen=True, array_like=True, tag="memory"):
    """What the platform said of its memory, in bytes; zeros when it could not."""

    total: float
    free: float

    def __str__(self) -> str:
        return f"memory: {self.free / 2**20:.0f} of {self.total / 2**20:.0f} MiB are free"


class Planned(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """A step was launched.

    decode: slots that decode, intp.  chunks: (request, slot, start, stop, scores, sample) of each prefill chunk.
    written: CRC-32 of the slots of K and V that the batch writes, so of every choice of a page.
    free, evictable: pages after planning.  drafts: packed slots of the rows with drafts, then the length of each.
    """

    step: int
    decode: bytes
    chunks: tuple[tuple[str, int, int, int, int, bool], ...]
    written: int
    free: int
    evictable: int
    drafts: bytes = b""

    def __str__(self) -> str:
        chunks = [f"{id}[{start}:{stop}]{'*' if sample else ''}" for id, _, start, stop, _, sample in self.chunks]
        more = f" and {len(chunks) - SHOWN_CHUNKS} more" if len(chunks) > SHOWN_CHUNKS else ""
        drafts = f"{len(self.drafts) // 8} with drafts, " if self.drafts else ""
        return (f"launch {self.step}: {len(self.decode) // SLOT_BYTES} decode, {drafts}{len(chunks)} chunks "
                f"{' '.join(chunks[:SHOWN_CHUNKS])}{more}; {self.free} pages free, {self.evictable} evictable")


class Result(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """A step's result, arrays as bytes: int32 tokens and top_ids, float32 logprobs and top_logprobs."""

    tokens: bytes
    logprobs: bytes | None = None
    top_ids: bytes | None = None
    top_logprobs: bytes | None = None

    def __str__(self) -> str:
        return f"result of {len(self.tokens) // 4} rows"


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """A step failed on the device when it was launched or collected."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"failure at {self.where}: {self.message}"


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="grammar"):
    """What grammars said of a step's tokens, or of the next ones, as `core.scheduler.masks` writes it."""

    said: bytes

    def __str__(self) -> str:
        return f"grammars said {len(self.said)} bytes"


class Drafted(msgspec.Struct, frozen=True, array_like=True, tag="draft"):
    """What a drafter proposed for a step, as `core.speculation.speculation` writes it."""

    said: bytes

    def __str__(self) -> str:
        return f"{len(self.said) // 4} numbers of drafts"


Entry = Answered | Drafted | Submitted | Aborted | Commanded | Stepped | Now | Memory | Planned | Result | Failure
CALLS = (Submitted, Aborted, Commanded, Stepped)


def planned(plan: Any, batch: Batch, cache: Any) -> Planned:
    """The decision behind a scheduler's `Plan` and its batch."""
    chunks = tuple([(c.request.id, int(c.slot), int(c.start), int(c.stop), int(c.scores), bool(c.sample))
                    for c in plan.chunks])
    drafts = b"" if plan.drafts is None else pack_ids(np.concatenate([plan.drafts.slots, plan.drafts.counts]))
    return Planned(plan.step, plan.decode.tobytes(), chunks, zlib.crc32(batch.slots.tobytes()), cache.pool.free,
                   cache.tree.evictable, drafts)


def pack_result(result: StepResult) -> Result:
    """A step's result as an entry."""
    return Result(pack_ids(result.tokens), *(None if a is None else np.ascontiguousarray(a).tobytes()
                                             for a in result[1:]))


def unpack_result(result: Result) -> StepResult:
    """The inverse of `pack_result`."""
    rows = len(result.tokens) // 4
    shape = (rows, -1) if rows and result.top_ids else (rows, 0)
    tops = [None if data is None else np.frombuffer(data, dtype).reshape(shape)
            for data, dtype in ((result.top_ids, "<i4"), (result.top_logprobs, "<f4"))]
    return StepResult(unpack_ids(result.tokens),
                      None if result.logprobs is None else np.frombuffer(result.logprobs, "<f4"), *tops)
