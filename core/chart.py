"""Charts of curves: PNG by matplotlib, or an HTML page with SVG in it that needs nothing else."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from .errors import ConfigError

COLOURS = ("#1f77b4", "#d62728", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
WIDTH, HEIGHT, LEFT, BELOW = 570, 420, 64, 48  # of the field with its axes
NAMES, LETTER = 44, 7.5                       # beside it the names of the curves: of their marks, and of each letter
TICKS = 10  # at most, on an axis without its own
STYLE = ("body{font:15px system-ui;margin:2em;max-width:52em}table{border-collapse:collapse;margin:1em 0}"
         "th,td{padding:.3em .8em;text-align:right;border-bottom:1px solid #ccc}svg{width:100%}"
         "div{overflow-x:auto}"
         "pre{white-space:pre-wrap;font-size:13px}")


@dataclass(frozen=True)
class Chart:
    """Curves over one axis, y from 0 up. curves: points by name.  ticks: (where, what stands there) on the x axis;
    () = chosen evenly.  unit: of the y values, behind them when a point is pointed at."""

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    ticks: Sequence[tuple[float, str]] = ()
    unit: str = ""

    @property
    def points(self) -> list[tuple[float, float]]:
        return [point for curve in self.curves.values() for point in curve] or [(0.0, 0.0)]

    def marks(self) -> Sequence[tuple[float, str]]:
        """The ticks of the x axis."""
        if self.ticks:
            return self.ticks
        low, high = min(x for x, _ in self.points), max(x for x, _ in self.points)
        step = step_of(max(high - low, 1e-9))
        first = math.ceil(low / step)
        return [(i * step, f"{i * step:g}") for i in range(first, int(high / step) + 1)]


@dataclass(frozen=True)
class Table:
    """A table of texts; the first cell of a row is its name."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


def step_of(span: float) -> float:
    """The distance of at most `TICKS` ticks over a span: 1, 2 or 5 times a power of ten."""
    size = 10.0 ** math.floor(math.log10(span / TICKS))
    return next(size * factor for factor in (1, 2, 5, 10) if span / (size * factor) <= TICKS)


def check_plot(path: Path) -> None:
    """Raises `ConfigError` for a file that `write_charts` could not write: another ending, or a missing library."""
    if path.suffix not in (".png", ".html"):
        raise ConfigError(f"--plot {path}: the name must end with .png or .html")
    if path.suffix == ".png":
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"--plot {path}: matplotlib is not installed (pip install 'isthmus[bench]'); "
                              "an .html file needs nothing") from error


def write_charts(path: Path, title: str, charts: Sequence[Chart], tables: Sequence[Table] = (),
                 words: str = "") -> None:
    """Write charts to a .png file, or with the tables and the words behind them to an .html file. Raises what
    `check_plot` does."""
    check_plot(path)
    if path.suffix == ".png":
        _png(path, title, charts)
    else:
        path.write_text(page(title, charts, tables, words), encoding="utf-8")


def page(title: str, charts: Sequence[Chart], tables: Sequence[Table] = (), words: str = "") -> str:
    """A page that loads nothing."""
    several = len(charts) > 1
    drawn = "".join((f"<h2>{escape(chart.title)}</h2>" if several else "") + svg(chart) for chart in charts)
    listed = "".join(
        "<div><table><tr>" + "".join(f"<th>{escape(head)}</th>" for head in table.heads) + "</tr>"
        + "".join("<tr>" + f"<th>{escape(row[0])}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
                  + "</tr>" for row in table.rows) + "</table></div>" for table in tables)
    behind = f"<pre>{escape(words)}</pre>" if words else ""
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
            f"<style>{STYLE}</style><h1>{escape(title)}</h1>{drawn}{listed}{behind}</html>\n")


def svg(chart: Chart) -> str:
    """The chart as a picture in a page."""
    low, high = min(x for x, _ in chart.points), max(x for x, _ in chart.points)
    top = max(1e-9, *(y for _, y in chart.points)) * 1.05
    step, room = step_of(top), (high - low) * 0.04 or 0.5
    whole = WIDTH + NAMES + LETTER * max((len(name) for name in chart.curves), default=0)
    x = lambda v: LEFT + (v - low + room) / (high - low + 2 * room) * (WIDTH - LEFT)  # noqa: E731
    y = lambda v: HEIGHT - BELOW - v / top * (HEIGHT - BELOW - 12)                  # noqa: E731
    parts = []
    for k in range(int(top / step) + 1):
        at = y(k * step)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>'
                     f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{k * step:g}</text>')
    parts += [f'<text x="{x(at):.1f}" y="{HEIGHT - BELOW + 20}" text-anchor="middle">{escape(text)}</text>'
              for at, text in chart.marks()]
    names = dict(chart.ticks)
    for n, (name, points) in enumerate(chart.curves.items()):
        colour = COLOURS[n % len(COLOURS)]
        line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        dots = "".join(f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5" fill="{colour}"><title>{escape(name)} at '
                       f"{escape(names.get(a, f'{a:g}'))}: {b:.4g}{escape(chart.unit)}</title></circle>"
                       for a, b in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'
                     f'<rect x="{WIDTH + 12}" y="{20 + 22 * n}" width="12" height="12" fill="{colour}"/>'
                     f'<text x="{WIDTH + 30}" y="{31 + 22 * n}">{escape(name)}</text>')
    return (f'<svg viewBox="0 0 {whole:.0f} {HEIGHT}" role="img" aria-label="{escape(chart.y_label)} over '
            f'{escape(chart.x_label)}" font-family="system-ui" font-size="13">{"".join(parts)}'
            f'<text x="{LEFT}" y="10">{escape(chart.y_label)}</text>'
            f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(chart.x_label)}'
            "</text></svg>")


def _png(path: Path, title: str, charts: Sequence[Chart]) -> None:
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7.2, 4.2 * len(charts)), layout="constrained")
    for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
        for (name, points), colour in zip(chart.curves.items(), COLOURS * len(chart.curves), strict=False):
            axes.plot([a for a, _ in points], [b for _, b in points], "o-", label=name, color=colour, markersize=4)
        if chart.ticks:
            axes.set_xticks([at for at, _ in chart.ticks], [text for _, text in chart.ticks])
        axes.set_xlabel(chart.x_label)
        axes.set_ylabel(chart.y_label)
        axes.set_ylim(bottom=0)
        axes.set_title(title if len(charts) == 1 else chart.title)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=150)
