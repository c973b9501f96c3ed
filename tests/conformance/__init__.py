"""The conformance kit: laws that every platform is held to, run by `isthmus conformance --platform=NAME`.

It needs nothing but isthmus and numpy: no framework, no test runner, no source tree.
"""
from __future__ import annotations

from .case import Case, Context, Needs, Wrong
from .laws import LAWS, all_cases
from .ledger import Ledger, ledger_of, read_ledger
from .report import Outcome, Report, Result
from .runner import Refused, run_case, run_suite

__all__ = ["LAWS", "Case", "Context", "Ledger", "Needs", "Outcome", "Refused", "Report", "Result", "Wrong", "all_cases",
           "ledger_of", "read_ledger", "run_case", "run_suite"]
