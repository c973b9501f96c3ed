"""Running cases and telling their outcomes apart."""
from __future__ import annotations

import inspect
import platform as machine
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..core import manifests
from ..core.discovery import load_platform, probe, told
from ..core.errors import said
from ..core.platform import Unavailable, Unsupported
from ..core.registry import RegistrationError
from .case import Case, Context, NotClaimed, Wrong, asked
from .laws import all_cases
from .ledger import Ledger, ledger_of
from .report import Outcome, Report, Result, manifest_data
from .watch import at_most, named

Progress = Callable[[int, int, Result | None, str], None]  # (cases done, in all, the last result, the next case's id)


class Refused(Exception):
    """There is nothing to hold this platform to; the message is the platform's own reason."""


def run_case(context: Context, case: Case, ledger: Ledger, limit: float | None = None) -> Result:
    """One case; raises nothing but `KeyboardInterrupt`, whatever the platform does. limit: seconds after which it is an
    error."""
    began = time.perf_counter()
    reason, claimed = ledger.declared(case), True
    error: BaseException | None = None
    try:
        reason = reason or case.needs.missing(context.platform, context.manifest)
        if reason is None:
            with at_most(limit):
                named(case)(context)
    except Unsupported as refused:
        reason, claimed = said(refused) or "unsupported", not isinstance(refused, NotClaimed)
    except KeyboardInterrupt:
        raise
    except BaseException as raised:  # whatever a platform raises is a finding, never the end of the run
        error = raised
    seconds = time.perf_counter() - began
    if limit is not None and seconds >= limit and not isinstance(error, TimeoutError):  # it may have been caught inside
        error = TimeoutError(f"took longer than {limit:g} s")
    if reason is not None:
        return Result(case, Outcome.UNSUPPORTED, reason, {}, seconds, claimed=claimed)
    result = _judge(case, error, ledger, seconds, context.kind)
    return replace(result, kept=result.outcome is Outcome.PASSED and _keeps(context, case))


def _keeps(context: Context, case: Case) -> bool:
    """Is the case about a format that the platform says it has a kernel for?"""
    try:
        return bool(case.format) and asked(context.platform, "linear", format=case.format, dtype=case.dtype) is None
    except KeyboardInterrupt:
        raise
    except BaseException:  # a finding of the law manifest, not of this case
        return False


def _offered_ops(kind: type) -> tuple[str, ...]:
    """Ops in the manifest file beside the platform's class; none where it cannot be read, which the law manifest tells.
    """
    try:
        return tuple(manifests.read_file(Path(inspect.getfile(kind)).with_name(manifests.FILE)).ops)
    except RegistrationError:
        return ()


def _judge(case: Case, error: BaseException | None, ledger: Ledger, seconds: float, kind: type) -> Result:
    """The outcome of a case that ran, in the light of what the ledger expects."""
    entry = ledger.expected(case)
    if error is None:
        if entry is None:
            return Result(case, Outcome.PASSED, "", {}, seconds)
        return Result(case, Outcome.UNEXPECTED, f"the ledger expects a failure ({entry.reason}): remove its entry "
                      f"{entry.case!r}", {}, seconds)
    numbers = error.numbers() if isinstance(error, Wrong) else {}
    reason = said(error)
    if not isinstance(error, AssertionError):
        reason = f"{type(error).__name__}: {reason}{_place(error, kind)}"
    outcome = Outcome.WRONG if isinstance(error, AssertionError) else Outcome.ERROR
    if entry and (entry.error in said(error) if entry.error else outcome is Outcome.WRONG):
        return Result(case, Outcome.EXPECTED, f"{entry.reason} ({reason})", numbers, seconds)
    return Result(case, outcome, reason, numbers, seconds)


def _place(error: BaseException, kind: type) -> str:
    """Where in the platform's own folder it was raised, or nothing."""
    folder = Path(inspect.getfile(kind)).parent
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == folder]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}: {own[-1].line})" if own else ""


def run_suite(platform: Any, options: Mapping[str, str] | None = None, *, only: Sequence[str] = (), seed: int = 0,
              ledger: Ledger | None = None, progress: Progress | None = None, stop_early: bool = False,
              limit: float | None = None) -> Report:
    """Hold a platform to the laws.

    platform: a name, a class or function that makes a platform from its options, or an object that was not probed
    yet (then what needs a second object is unsupported).  only: as in `laws.all_cases`.  ledger: the one beside the
    platform's class unless given.  stop_early: end at the first case that is wrong or an error.
    limit: seconds for a case; the run ends at one that takes longer, since what it left behind may never end.
    Raises `Refused` for a platform that computes nothing, `RegistrationError` for its mistakes before the first case,
    `ValueError` for an unknown pattern. Ctrl-C ends the run with the report of what was run.
    """
    started, began = datetime.now(UTC), time.perf_counter()
    cases, make = all_cases(only), _factory(platform, dict(options or {}))
    name = platform if isinstance(platform, str) else getattr(platform, "__name__", type(platform).__name__)
    made: Any = None
    try:
        with at_most(limit):
            made = make() if make else platform
            ledger = ledger_of(made) if ledger is None else ledger
            if (reason := ledger.refusal()) is not None:
                raise Refused(f"{name} cannot be held to the laws: {reason}")
            manifest = probe(name, made)
    except Unavailable as error:
        results = tuple(Result(case, Outcome.UNAVAILABLE, said(error)) for case in cases)
        return _report(name, seed, results, {}, {}, started, time.perf_counter() - began)
    context = Context(made, manifest, seed, make, name if isinstance(platform, str) else "")
    results, trouble, interrupted = _run_all(context, cases, ledger, progress, stop_early, limit)
    troubles = [trouble] if trouble else _closed(context)
    stale = () if only else tuple(ledger.stale(cases))
    return _report(context.name or manifest.name, seed, results, manifest_data(manifest, _offered_ops(context.kind)),
                   manifest.details, started, time.perf_counter() - began, stale, bool(only), tuple(troubles),
                   interrupted)


def _closed(context: Context) -> list[str]:
    """Let the platform go: what is to be told of that."""
    try:
        context.close()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return [f"close() raised {told(error)}"]
    return []


def _run_all(context: Context, cases: Sequence[Case], ledger: Ledger, progress: Progress | None,
             stop_early: bool, limit: float | None) -> tuple[tuple[Result, ...], str, bool]:
    """-> results, what ended the run early, and was that Ctrl-C. After that nothing can be asked of the platform."""
    tell = progress or (lambda done, total, last, following: None)
    results: list[Result] = []
    trouble, interrupted = "", False
    for case in cases:
        try:
            tell(len(results), len(cases), results[-1] if results else None, case.id)
            results.append(run_case(context, case, ledger, limit))
        except KeyboardInterrupt:
            trouble, interrupted = f"interrupted: {case.id} and the cases behind it were not run", True
            break
        if limit is not None and results[-1].seconds >= limit:
            trouble = f"the cases behind {case.id} were not run"
            break
        if stop_early and results[-1].outcome in (Outcome.WRONG, Outcome.ERROR):
            break
    tell(len(results), len(cases), results[-1] if results else None, "")
    return tuple(results), trouble, interrupted


def _factory(platform: Any, options: dict[str, str]) -> Callable[[], Any] | None:
    """What makes a fresh platform, or None for an object."""
    if isinstance(platform, str):
        return lambda: load_platform(platform, options)
    if callable(platform) and not callable(getattr(platform, "probe", None)) or isinstance(platform, type):
        return lambda: platform(options)
    return None


def _report(name: str, seed: int, results: tuple[Result, ...], manifest: dict[str, Any], details: Mapping[str, str],
            started: datetime, seconds: float, stale: tuple[str, ...] = (), partial: bool = False,
            troubles: tuple[str, ...] = (), interrupted: bool = False) -> Report:
    versions = {"isthmus": _version(), "python": machine.python_version(), **details}
    return Report(name, seed, results, manifest, versions, f"{machine.platform()}, {machine.machine()}",
                  started.isoformat(timespec="seconds"), seconds, stale, partial, troubles, interrupted)


def _version() -> str:
    try:
        return version(__package__.partition(".")[0])
    except PackageNotFoundError:
        return "unknown"
