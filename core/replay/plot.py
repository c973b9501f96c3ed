"""Hit rate over capacity as a picture: PNG by matplotlib, or an HTML page with SVG in it that needs nothing."""
from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from ..errors import ConfigError

COLOURS = ("#1f77b4", "#d62728", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
WIDTH, HEIGHT, LEFT, BELOW = 720, 420, 56, 48


def check_plot(path: Path) -> None:
    """Raises `ConfigError` for a file that `write_plot` could not write: another ending, or a missing library."""
    if path.suffix not in (".png", ".html"):
        raise ConfigError(f"--plot {path}: the name must end with .png or .html")
    if path.suffix == ".png":
        try:
            import matplotlib.figure  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"--plot {path}: matplotlib is not installed (pip install 'isthmus[bench]'); "
                              "an .html file needs nothing") from error


def write_plot(report: dict[str, Any], path: Path) -> None:
    """Write the report's picture to a .png or .html file. Raises what `check_plot` does."""
    check_plot(path)
    if path.suffix == ".html":
        path.write_text(_page(report), encoding="utf-8")
    else:
        _png(report, path)


def _curves(report: dict[str, Any]) -> tuple[list[str], dict[str, list[float]]]:
    """Names of the capacities, and for each policy its hit rates there in percent."""
    ticks, curves = [], {}
    for result in report["results"]:
        unit = " %" if result["capacity_unit"] == "percent" else ""
        if (name := f"{result['capacity']:,}{unit}") not in ticks:
            ticks.append(name)
        curves.setdefault(result["policy"], []).append(100 * result["token_hit_rate"])
    return ticks, curves


def _title(report: dict[str, Any]) -> str:
    hints = f", {report['hint_endings']:.0%} of endings hinted" if report["hint_endings"] else ""
    return f"{report['trace']}: {report['requests']:,} requests{hints}"


def _png(report: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure
    ticks, curves = _curves(report)
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for (name, values), colour in zip(curves.items(), COLOURS * len(curves), strict=False):
        axes.plot(range(len(values)), values, "o-", label=name, color=colour)
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set_xlabel("capacity" + (" (share of the working set)" if "%" in ticks[0] else " (tokens)"))
    axes.set_ylabel("token hit rate, %")
    axes.set_ylim(bottom=0)
    axes.set_title(_title(report))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _page(report: dict[str, Any]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in _curves(report)[0])
    rows = "".join(f"<tr><th>{escape(name)}</th>" + "".join(f"<td>{v:.1f}</td>" for v in values) + "</tr>"
                   for name, values in _curves(report)[1].items())
    title = escape(_title(report))
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
            "<style>body{font:15px system-ui;margin:2em;max-width:52em}table{border-collapse:collapse}"
            "th,td{padding:.3em .8em;text-align:right;border-bottom:1px solid #ccc}svg{width:100%}</style>"
            f"<h1>{title}</h1>{_svg(report)}"
            f"<table><tr><th>token hit rate, %</th>{head}</tr>{rows}</table></html>\n")


def _svg(report: dict[str, Any]) -> str:
    ticks, curves = _curves(report)
    top = max(1.0, *(v for values in curves.values() for v in values)) * 1.05
    step = next(s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if top / s <= 10)
    x = lambda i: LEFT + (i + 0.5) * (WIDTH - LEFT - 150) / len(ticks)  # noqa: E731
    y = lambda v: HEIGHT - BELOW - v / top * (HEIGHT - BELOW - 12)      # noqa: E731
    parts = []
    for k in range(int(top / step) + 1):
        at = y(k * step)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 150}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>'
                     f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{k * step:g}</text>')
    parts += [f'<text x="{x(i):.1f}" y="{HEIGHT - BELOW + 20}" text-anchor="middle">{escape(t)}</text>'
              for i, t in enumerate(ticks)]
    for n, (name, values) in enumerate(curves.items()):
        colour = COLOURS[n % len(COLOURS)]
        line = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values))
        dots = "".join(f'<circle cx="{x(i):.1f}" cy="{y(v):.1f}" r="3.5" fill="{colour}">'
                       f"<title>{escape(name)} at {escape(ticks[i])}: {v:.2f} %</title></circle>"
                       for i, v in enumerate(values))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'
                     f'<rect x="{WIDTH - 138}" y="{20 + 22 * n}" width="12" height="12" fill="{colour}"/>'
                     f'<text x="{WIDTH - 120}" y="{31 + 22 * n}">{escape(name)}</text>')
    return (f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="token hit rate over capacity" '
            f'font-family="system-ui" font-size="13">{"".join(parts)}'
            f'<text x="{(WIDTH - 150 + LEFT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">capacity</text></svg>')
