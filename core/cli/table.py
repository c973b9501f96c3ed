"""A table of words for a terminal."""
from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..errors import printable


def print_table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> None:
    """Print it with columns as wide as their widest cell. right: columns of numbers, flush right."""
    lines = [tuple(heads), *(tuple(printable(cell).replace("\n", " ") for cell in row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (f"{cell:>{width}}" if i in right else f"{cell:{width}}"
                 for i, (cell, width) in enumerate(zip(line, widths, strict=True)))
        print("  ".join(cells).rstrip())
