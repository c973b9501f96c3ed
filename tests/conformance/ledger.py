"""A platform's `ledger.toml`: what is known about its cases, each with a reason.

    [[unsupported]]            # skipped, and listed with the reason
    case = "attention[*]"      # a shell pattern of ids; [ ] stand for themselves
    reason = "..."

    [[xfail]]                  # wrong today; strict: an unexpected pass fails the run, so the entry goes with its cause
    case = "linear[q4_1*]"
    reason = "..."
    error = "..."              # optional: the case ends with an error whose message holds this, instead of wrong values
"""
from __future__ import annotations

import inspect
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.registry import RegistrationError
from .case import Case
from .laws import matches


@dataclass(frozen=True)
class Entry:
    case: str
    reason: str
    error: str | None = None


@dataclass(frozen=True)
class Ledger:
    """Entries by kind; empty where a platform has no file."""

    unsupported: tuple[Entry, ...] = ()
    xfail: tuple[Entry, ...] = ()

    def declared(self, case: Case) -> str | None:
        """The reason why the platform does not support the case, if it says so."""
        return next((e.reason for e in self.unsupported if matches(case.id, e.case)), None)

    def expected(self, case: Case) -> Entry | None:
        """The entry that expects the case to fail."""
        return next((e for e in self.xfail if matches(case.id, e.case)), None)

    def refusal(self) -> str | None:
        """Why there is nothing to hold the platform to: the reason of an entry for every case."""
        return next((e.reason for e in self.unsupported if e.case == "*"), None)

    def stale(self, cases: Iterable[Case]) -> list[str]:
        """Patterns that no case has any more."""
        ids = [case.id for case in cases]
        return [e.case for e in (*self.unsupported, *self.xfail) if not any(matches(i, e.case) for i in ids)]


def read_ledger(path: Path) -> Ledger:
    """The ledger in a file. Raises `RegistrationError` that names the file for anything it cannot be."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
        unknown = set(content) - {"unsupported", "xfail"}
        if unknown:
            raise ValueError(f"unknown table {', '.join(sorted(unknown))}; there are: unsupported, xfail")
        return Ledger(**{kind: _entries(kind, entries) for kind, entries in content.items()})
    except (OSError, ValueError, RecursionError) as error:  # tomllib's are ValueErrors
        raise RegistrationError(f"{path}: {error}") from error


def _entries(kind: str, entries: Any) -> tuple[Entry, ...]:
    if not isinstance(entries, list):
        raise ValueError(f"{kind} is {entries!r:.60}; tables [[{kind}]] are needed")
    for fields in entries:
        if not isinstance(fields, dict) or not {"case", "reason"} <= set(fields) <= {"case", "reason", "error"}:
            raise ValueError(f"[[{kind}]] {fields!r}: an entry has case and reason, and perhaps error")
        if bad := [name for name, text in fields.items() if not isinstance(text, str) or not text.strip()]:
            raise ValueError(f"[[{kind}]] {fields!r}: {bad[0]} must be a text that says something")
    return tuple(Entry(**fields) for fields in entries)


def ledger_of(platform: Any) -> Ledger:
    """The `ledger.toml` beside the module of the platform's class, in this tree or in another package."""
    path = Path(inspect.getfile(type(platform))).with_name("ledger.toml")
    return read_ledger(path) if path.is_file() else Ledger()
