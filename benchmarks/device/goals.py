"""What the project set itself for an H200, beside what was found; for other devices the figures are information.

Source: the issue that asked for these platforms.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Row = dict[str, Any]
Rows = dict[str, Sequence[Row]]


def decode_attention(rows: Rows) -> Iterable[float]:
    """The better of the platform's ways."""
    yield from sorted(row["of bandwidth"] for row in rows.get("attention", ())
                      if row.get("rows") == 16 and row.get("context") == 32768 and row.get("kv") == "bfloat16"
                      and row.get("of bandwidth") and "SDPA" not in row["by"])[-1:]


def prefill(rows: Rows) -> Iterable[float]:
    """Of the largest prefills."""
    found = [row for row in rows.get("llama", ()) if row.get("what") == "prefill" and row.get("floor") == "products"]
    most = max((row["rows"] * row["tokens"] for row in found), default=0)
    yield from (1 / row["times floor"] for row in found if row["rows"] * row["tokens"] == most)


def decode_step(rows: Rows) -> Iterable[float]:
    yield from (row["times floor"] for name in ("llama", "qwen") for row in rows.get(name, ())
                if row.get("what") == "decode" and row["graphs"] and "times floor" in row)


def one_token(rows: Rows) -> Iterable[float]:
    yield from (1 / row["of bandwidth"] for row in rows.get("linears", ())
                if row.get("tokens") == 1 and row["format"] in ("q4_0", "fp8") and row.get("of bandwidth"))


def engine(rows: Rows) -> Iterable[float]:
    yield from (row["times as fast"] for row in rows.get("engine", ()) if "times as fast" in row)


# What, the figures, whether it is the least (True) or the most that they may be, and the limit.
GOALS: tuple[tuple[str, Callable[[Rows], Iterable[float]], bool, float], ...] = (
    ("decode attention, 16 rows of 32k tokens: share of bandwidth", decode_attention, True, 0.85),
    ("dense bf16 prefill: share of the rate of products", prefill, True, 0.8),
    ("decode steps with graphs: times their floor", decode_step, False, 1.25),
    ("int4 and fp8 products of one token: times their floor", one_token, False, 1.2),
    ("engine: times as fast as transformers' continuous batching", engine, True, 3.0))


def verdicts(rows: Rows) -> list[Row]:
    """One row for each goal; what was not measured says so."""
    found = []
    for what, figures, least, limit in GOALS:
        values = [round(value, 3) for value in figures(rows)]
        worst = (min if least else max)(values, default=None)
        met = "not measured" if worst is None else "met" if (worst >= limit if least else worst <= limit) else "not met"
        found.append({"goal": what, "limit": f"{'at least' if least else 'at most'} {limit:g}", "worst": worst,
                      "verdict": met})
    return found
