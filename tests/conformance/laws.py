"""The laws, each a module with `cases()`; what the suite runs is the list that `all_cases` makes of them."""
from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from . import law_compile, law_drafts, law_manifest, law_model, law_ops, law_parallel, law_scheduler, law_state
from .case import Case

LAWS = {"manifest": law_manifest.cases, "ops": law_ops.cases, "model": law_model.cases, "state": law_state.cases,
        "compile": law_compile.cases, "parallel": law_parallel.cases, "scheduler": law_scheduler.cases,
        "drafts": law_drafts.cases}


def all_cases(only: Sequence[str] = ()) -> list[Case]:
    """Every case in the order of the laws; `only`: laws by name, or shell patterns of ids ([ ] stand for themselves).

    Raises `ValueError` for a pattern that no case has.
    """
    cases = [case for law in LAWS.values() for case in law()]
    for pattern in only:
        if not any(wanted(case, pattern) for case in cases):
            raise ValueError(f"{pattern!r} is no law and no case; laws: {', '.join(LAWS)}; ops and other subjects: "
                             f"{', '.join(dict.fromkeys(case.op for case in cases))}; in patterns only * and ? "
                             "stand for anything else than themselves")
    return [case for case in cases if not only or any(wanted(case, pattern) for pattern in only)]


def wanted(case: Case, pattern: str) -> bool:
    """Does `pattern` name the case's law or op, or match its id?"""
    return pattern in (case.law, case.op) or matches(case.id, pattern)


def matches(id: str, pattern: str) -> bool:
    return fnmatchcase(id, pattern.replace("[", "[[]"))
