"""Hit rate over capacity as a picture."""
from __future__ import annotations

from pathlib import Path
from typing import Any

from ..chart import Chart, Table, check_plot, write_charts

__all__ = ["check_plot", "write_plot"]


def write_plot(report: dict[str, Any], path: Path) -> None:
    """Write the report's picture to a .png or .html file. Raises what `check_plot` does."""
    ticks, curves = _curves(report)
    hints = f", {report['hint_endings']:.0%} of endings hinted" if report["hint_endings"] else ""
    title = f"{report['trace']}: {report['requests']:,} requests{hints}"
    axis = "capacity" + (" (share of the working set)" if "%" in ticks[0] else " (tokens)")
    chart = Chart(title, axis, "token hit rate, %", {name: list(enumerate(values)) for name, values in curves.items()},
                  list(enumerate(ticks)), " %")
    table = Table(["token hit rate, %", *ticks], [[name, *(f"{v:.1f}" for v in values)]
                                                  for name, values in curves.items()])
    write_charts(path, title, [chart], [table])


def _curves(report: dict[str, Any]) -> tuple[list[str], dict[str, list[float]]]:
    """Names of the capacities, and for each policy its hit rates there in percent."""
    ticks, curves = [], {}
    for result in report["results"]:
        unit = " %" if result["capacity_unit"] == "percent" else ""
        if (name := f"{result['capacity']:,}{unit}") not in ticks:
            ticks.append(name)
        curves.setdefault(result["policy"], []).append(100 * result["token_hit_rate"])
    return ticks, curves
