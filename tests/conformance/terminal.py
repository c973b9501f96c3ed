"""The report in a terminal: a live line while cases run, then the grid, failures with numbers, and reasons."""
from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .case import Case
from .report import BAD, NOT_CLAIMED, Outcome, Report, Result, cell, worst

MAX_REASONS = 12
MAX_FAILURES = 60
MIN_WIDTH = 20


class ProgressBar:
    """Cases done, in all, the next one's id, how many are wrong; nothing where standard error is no terminal.

    verbose: each case's id before it is run, then its outcome and seconds, instead.
    """

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose
        self._bar = Progress(TextColumn("{task.description}", markup=False), BarColumn(20), MofNCompleteColumn(),
                             TimeElapsedColumn(), TextColumn("{task.fields[bad]}"), transient=True,
                             console=Console(stderr=True), disable=verbose or not sys.stderr.isatty())
        self._task, self._bad, self._done = self._bar.add_task("conformance", total=None, bad=""), 0, 0

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
                 ) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int, last: Result | None, following: str) -> None:
        if done == self._done:  # none was finished since: the first, or the run was interrupted
            last = None
        self._done = done
        if self._verbose:
            told = f" {last.word}, {last.seconds:.2f} s" if last else ""
            told += "\n" * (done > 0 or not following)
            told += f"{done + 1}/{total} {following}" if following else ""
            print(told, end="", file=sys.stderr, flush=True)
        self._bad += last is not None and last.outcome in BAD
        self._bar.update(self._task, description=following[:44].ljust(44), total=total, completed=done,
                         bad=f"{self._bad} wrong" if self._bad else "")


def show(report: Report, console: Any = None) -> None:
    """Print the whole report."""
    console = console or Console(highlight=False)
    if console.width < MIN_WIDTH:  # as with COLUMNS=0
        console.width = 80
    if set(report.counts()) == {Outcome.UNAVAILABLE}:
        console.print(f"{report.platform} is unavailable here: {escape(report.results[0].reason)}")
        return
    dtypes = report.dtypes()
    table = Table("law", "subject", *dtypes, title=f"conformance of {report.platform}")
    law = ""
    for (name, op), row in report.grid().items():
        if law and name != law:
            table.add_section()
        table.add_row("" if name == law else name, op, *(_coloured(row.get(dtype)) for dtype in dtypes))
        law = name
    console.print(table)
    _show_failures(report, console)
    for outcome in (Outcome.EXPECTED, Outcome.UNSUPPORTED):
        reasons = report.reasons(outcome)
        for reason, count in reasons[:MAX_REASONS]:
            console.print(f"{outcome} ({count}): {escape(reason)}")
        if len(reasons) > MAX_REASONS:
            console.print(f"{outcome}: {len(reasons) - MAX_REASONS} reasons more (--json has all)")
    if skipped := report.reasons(NOT_CLAIMED):
        console.print("not claimed: " + escape(", ".join(f"{reason} ({count})" for reason, count in skipped)),
                      style="dim")
    slow = ", ".join(f"{result.case.id} {result.seconds:.1f} s" for result in worst(report.results, 3))
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    console.print(f"{escape(versions)}; seed {report.seed}", style="dim")
    console.print(f"slowest: {escape(slow)}", style="dim")
    console.print(f"{escape(report.summary())}, in {report.seconds:.1f} s: "
                  + ("[green]holds[/]" if report.ok else "[red]does not hold[/]"))


def _show_failures(report: Report, console: Any) -> None:
    failures = report.alike()
    for result, others in failures[:MAX_FAILURES]:
        more = f" and {len(others)} more, such as {others[0]}" if others else ""
        console.print(f"[red]{result.outcome}[/] [bold]{escape(result.case.id)}[/]{escape(more)}: "
                      f"{escape(result.reason)}")
    if left := sum(1 + len(others) for _, others in failures[MAX_FAILURES:]):
        console.print(f"[red]and {left} failures more (--json has all)[/]")
    for pattern in report.stale:
        console.print(f"[red]stale[/] the ledger's {escape(repr(pattern))} is no case any more: remove the entry")
    for told in report.unproved():
        console.print(f"[red]unproved[/] {escape(told)}")


def _coloured(counts: Any) -> str:
    text = cell(counts)
    if not counts:
        return text
    if any(outcome in BAD for outcome in counts):
        return f"[red]{text}[/]"
    return f"[dim]{text}[/]" if Outcome.PASSED not in counts else f"[green]{text}[/]"


def list_cases(cases: Sequence[Case], console: Any = None) -> None:
    """One line a case: id, law, tolerance, what it needs."""
    console = console or Console(highlight=False, soft_wrap=True)
    for case in cases:
        tolerance = f"{case.tolerance:.0e}" if case.tolerance else "-"
        console.print(f"{case.id:58} {case.law:10} {tolerance:7} {', '.join(case.needs.words())}", markup=False)
