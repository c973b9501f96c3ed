"""Results as words and as charts."""
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..chart import Chart, Table, write_charts
from ..errors import ConfigError
from .result import FIGURES, Result, Run, shown_figure

COLUMNS = ("output_tokens_per_s", "requests_per_s", "goodput_per_s", "within_slo", "hit_rate", "ttft_p50", "ttft_p99",
           "tpot_p50", "tpot_p99", "failed")
QUANTILES = ("p50", "p90", "p95", "p99", "max")
MAIN = ("roof_share", "peer_ratio", "tokens_per_s", "output_tokens_per_s", "ready_s", "resident_bytes",
        "perplexity_delta")
FEW = 6  # runs whose names stand side by side


def table_of(runs: Sequence[Run], columns: Sequence[str] = ()) -> Table:
    """A row for each run, of the figures that at least one of them has."""
    wanted = [name for name in columns or FIGURES if any(name in run.figures for run in runs)]
    return Table(["", *(FIGURES[name].label for name in wanted)],
                 [[run.label, *(shown_figure(name, run.figures[name]) if name in run.figures else "-"
                                for name in wanted)] for run in runs])


def text_of(table: Table) -> list[str]:
    """The table for a terminal."""
    lines = [list(table.heads), *map(list, table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(f"{cell:{'<' if i == 0 else '>'}{width}}" for i, (cell, width) in
                      enumerate(zip(line, widths, strict=True))).rstrip() for line in lines]


def turned(table: Table) -> Table:
    """With its columns as rows."""
    columns = list(zip(table.heads, *table.rows, strict=True))
    return Table(columns[0], columns[1:])


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """What there is to see: over the load where there are several, percentiles of the times, output over the time, the
    rounds of two sides, and of anything else a figure for each run."""
    return [*_by_load(runs), *_waits(runs)] if any("timeline" in run.detail and "side" not in run.detail
                                                  for run in runs) else _rounds(runs) or _figures(runs)


def _waits(runs: Sequence[Run]) -> Iterator[Chart]:
    for key, title in (("ttft", "time to first token"), ("tpot", "time per output token"), ("e2e", "whole answer")):
        curves = {run.label: [(i, 1e3 * run.detail["percentiles"][key][q]) for i, q in enumerate(QUANTILES)]
                  for run in runs if run.detail.get("percentiles", {}).get(key)}
        if curves:
            yield Chart(title, "percentile", "ms", curves, list(enumerate(QUANTILES)), " ms")
    curves = {run.label: [((i + 0.5) * line["span"], v) for i, v in enumerate(line["output_tokens_per_s"])]
              for run in runs if (line := run.detail.get("timeline"))}
    yield Chart("output over time", "seconds", "tokens/s", curves, (), " tokens/s")


def _by_load(runs: Sequence[Run]) -> Iterator[Chart]:
    loads = [(amount, run) for run in runs if (amount := _amount(run)) is not None]
    if len({amount for amount, _ in loads}) < 2:
        return
    axis = "requests a second" if loads[0][1].detail["load"].get("rate") else "requests at once"
    for name, scale, unit in (("output_tokens_per_s", 1, "tokens/s"), ("ttft_p99", 1e3, "ms"),
                              ("within_slo", 100, "%")):
        points = sorted((amount, scale * run.figures[name]) for amount, run in loads if name in run.figures)
        if points:
            yield Chart(f"{FIGURES[name].label} by load", axis, unit, {FIGURES[name].label: points}, (), f" {unit}")


def _rounds(runs: Sequence[Run]) -> list[Chart]:
    """Of a comparison: both sides, round by round."""
    charts = []
    for name in ("output_tokens_per_s", "ttft_p50", "tpot_p50"):
        curves = {side: [(run.detail["round"] + 1, run.figures[name]) for run in runs
                         if run.detail.get("side") == side and name in run.figures] for side in "AB"}
        if all(curves.values()):
            charts.append(Chart(FIGURES[name].label, "round", FIGURES[name].unit,
                                {side: sorted(points) for side, points in curves.items()}))
    return charts


def _figures(runs: Sequence[Run]) -> list[Chart]:
    """A point for each run, numbered as in the table where names would not fit."""
    ticks = [(i, run.label if len(runs) <= FEW else str(i + 1)) for i, run in enumerate(runs)]
    charts = []
    for name in MAIN:
        points = [(i, run.figures[name]) for i, run in enumerate(runs) if name in run.figures]
        if points:
            charts.append(Chart(FIGURES[name].label, "run", FIGURES[name].unit, {FIGURES[name].label: points}, ticks))
    return charts[:3]


def _amount(run: Run) -> float | None:
    load = run.detail.get("load", {})
    return load.get("concurrency") or load.get("rate")


def draw(result: Result, path: Path) -> None:
    """The result's charts, and on a page its figures, configuration and machine. Raises `ConfigError` for a .png of a
    result without anything to draw."""
    title = f"isthmus bench {result.kind}: {result.subject.get('model', '')}".rstrip(": ")
    told: dict[str, Any] = {"configuration": dict(result.configuration), "subject": dict(result.subject),
                            "made": dict(result.made), "notes": list(result.notes)}
    charts, table = charts_of(result.runs), table_of(result.runs)
    if not charts and path.suffix == ".png":
        raise ConfigError(f"--plot {path}: there is nothing to draw; an .html page has the figures")
    write_charts(path, title, charts, [turned(table) if len(result.runs) <= FEW else table],
                 json.dumps(told, indent=1, ensure_ascii=False))
