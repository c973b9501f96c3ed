"""The answer of `/server_info` as `isthmus top` needs it. Whoever answers there is not trusted."""
from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

COUNT = 2**62
AMOUNT = 1e15
MAX_ROWS = 64  # owners of pages, parts of a step, reasons for which requests end

Count = Annotated[int, Meta(ge=-COUNT, le=COUNT)]
Amount = Annotated[float, Meta(ge=0, le=AMOUNT)]  # not a number is refused too
Counts = Annotated[dict[str, Count], Meta(max_length=MAX_ROWS)]


class _Health(Struct):
    ok: bool
    reason: str


class _Info(Struct):
    platform: str = ""


class _Stats(Struct):
    """None of it is there while the engine gives no numbers."""

    running: Count | UnsetType = UNSET
    waiting: Count | UnsetType = UNSET
    steps: Count | UnsetType = UNSET
    generated_tokens: Count | UnsetType = UNSET
    prompt_tokens: Count | UnsetType = UNSET
    preemptions: Count | UnsetType = UNSET
    finish_reasons: Counts | UnsetType = UNSET
    hit_rate_window: Amount | None | UnsetType = UNSET
    hit_rate_total: Amount | None | UnsetType = UNSET


class _ServerInfo(Struct):
    """time: seconds of a monotonic clock, never 0. started: seconds since 1970."""

    served_model_name: str
    time: Annotated[float, Meta(ge=1e-6, le=AMOUNT)]
    started: Amount
    health: _Health
    info: _Info
    stats: _Stats
    pages: Counts
    step_seconds: Annotated[dict[str, Amount], Meta(max_length=MAX_ROWS)]


def problem(found: Any) -> str:
    """What of an answer is not as a page needs it, with its place; "" when nothing is."""
    try:
        msgspec.convert(found, _ServerInfo)
    except msgspec.ValidationError as error:
        return str(error)
    return ""
