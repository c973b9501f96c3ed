"""What a run of the suite found, as data: outcomes that are never confused, JSON and Markdown."""
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from .case import Case


class Outcome(StrEnum):
    """What became of a case.

    PASSED; UNAVAILABLE: the platform cannot run here; UNSUPPORTED: declared, with a reason; EXPECTED: wrong as the
    ledger says; UNEXPECTED: passed although the ledger says that it fails; WRONG; ERROR: ended with an exception.
    """

    PASSED = "passed"
    UNAVAILABLE = "unavailable"
    UNSUPPORTED = "unsupported"
    EXPECTED = "expected failure"
    UNEXPECTED = "unexpected pass"
    WRONG = "wrong"
    ERROR = "error"


BAD = (Outcome.UNEXPECTED, Outcome.WRONG, Outcome.ERROR)
NOT_CLAIMED = "not claimed"  # how what is unsupported by choice, not for a lack, is counted for people


@dataclass(frozen=True)
class Result:
    """One case's outcome. reason: why, "" for a pass. numbers: NMSE, tolerance, first bad index. seconds: it took.
    kept: the case's format was kept by a kernel, as far as the platform says. claimed: what the case is about is among
    what the platform chose to offer (`NotClaimed`)."""

    case: Case
    outcome: Outcome
    reason: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    kept: bool = False
    claimed: bool = True

    @property
    def word(self) -> str:
        """The outcome for people."""
        return self.outcome.value if self.claimed else NOT_CLAIMED

    def as_dict(self) -> dict[str, Any]:
        case = self.case
        return {"id": case.id, "law": case.law, "op": case.op, "dtype": case.dtype, "needs": list(case.needs.words()),
                "tolerance": case.tolerance, "outcome": self.outcome.value, "claimed": self.claimed,
                "reason": self.reason,
                "numbers": dict(self.numbers), "seconds": round(self.seconds, 4)}


@dataclass(frozen=True)
class Report:
    """A whole run. stale: entries of the ledger that no case has. versions: of what took part, as far as known.
    partial: of chosen cases only.  troubles: what kept the run from its end, or the platform from its own.
    interrupted: by Ctrl-C, which is among them."""

    platform: str
    seed: int
    results: tuple[Result, ...]
    manifest: Mapping[str, Any]
    versions: Mapping[str, str]
    machine: str
    started: str
    seconds: float
    stale: tuple[str, ...] = ()
    partial: bool = False
    troubles: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        """The platform was there, nothing is wrong, nothing unexpected, and what it claims was shown."""
        counts = self.counts()
        bad = any(counts[outcome] for outcome in (*BAD, Outcome.UNAVAILABLE))
        return not (bad or self.stale or self.unproved())

    def unproved(self) -> list[str]:
        """Why a run in which nothing is wrong shows too little: of what the manifest claims something passed no case;
        of chosen cases none was run."""
        counts = self.counts()
        if self.troubles:
            return list(self.troubles)
        if self.partial or counts[Outcome.UNAVAILABLE]:
            return ["none of these cases was run: nothing is shown"] * (set(counts) == {Outcome.UNSUPPORTED})
        return [line for name, of in CLAIMS.items() for word in self.manifest.get(name, ())
                if (line := never_shown(name, word, [r for r in self.results if word in of(r.case)]))]

    def counts(self) -> Counter[Outcome]:
        return Counter(result.outcome for result in self.results)

    def failures(self) -> list[Result]:
        return [result for result in self.results if result.outcome in BAD]

    def alike(self) -> list[tuple[Result, list[str]]]:
        """Failures that say the same as one: the first of them, and the ids of the others."""
        found: dict[tuple[Outcome, str], list[Result]] = {}
        for result in self.failures():
            found.setdefault((result.outcome, result.reason), []).append(result)
        return [(first, [other.case.id for other in others]) for first, *others in found.values()]

    def dtypes(self) -> list[str]:
        """Those that some case was about, without those that the platform claims nothing of, if it claims any."""
        claimed = dict.fromkeys(result.case.dtype for result in self.results if result.claimed)
        return list(claimed or dict.fromkeys(result.case.dtype for result in self.results))

    def grid(self) -> dict[tuple[str, str], dict[str, Counter[str]]]:
        """(law, op) -> dtype -> how many cases had which outcome, in words."""
        table: dict[tuple[str, str], dict[str, Counter[str]]] = {}
        for result in self.results:
            row = table.setdefault((result.case.law, result.case.op), {})
            row.setdefault(result.case.dtype, Counter())[result.word] += 1
        return table

    def reasons(self, word: str) -> list[tuple[str, int]]:
        """Reasons of one outcome with the number of cases, most frequent first."""
        return Counter(r.reason for r in self.results if r.word == word).most_common()

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as `--json` writes it."""
        return {"format": 1, "platform": self.platform, "ok": self.ok, "seed": self.seed, "started": self.started,
                "seconds": round(self.seconds, 3), "machine": self.machine, "versions": dict(self.versions),
                "manifest": dict(self.manifest), "stale": list(self.stale),
                "unproved": self.unproved(), "not_claimed": sum(not result.claimed for result in self.results),
                "counts": {outcome.value: self.counts()[outcome] for outcome in Outcome},
                "cases": [result.as_dict() for result in self.results]}

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), ensure_ascii=False, indent=1)

    def as_markdown(self) -> str:
        """The grid, failures with numbers, and reasons."""
        dtypes = self.dtypes()
        lines = [f"# Conformance of {self.platform}", "", f"{self.summary()}", "",
                 f"Seed {self.seed}, {self.started}, {self.seconds:.0f} s on {self.machine}; "
                 + ", ".join(f"{name} {version}" for name, version in self.versions.items()) + ".", "",
                 "| law | subject | " + " | ".join(dtypes) + " |", "|---|---|" + "---|" * len(dtypes)]
        for (law, op), row in self.grid().items():
            lines.append(f"| {law} | {op} | " + " | ".join(cell(row.get(dtype)) for dtype in dtypes) + " |")
        for title, outcomes in (("Failures", BAD), ("Expected failures", (Outcome.EXPECTED,))):
            found = [result for result in self.results if result.outcome in outcomes]
            lines += ["", f"## {title}", ""] * bool(found)
            lines += [f"- `{r.case.id}` {r.outcome}: {r.reason}" for r in found]
        lines += [f"- the ledger's `{pattern}` is no case any more" for pattern in self.stale]
        lines += [f"- {told}" for told in self.unproved()]
        for word in (Outcome.UNSUPPORTED, NOT_CLAIMED):
            reasons = self.reasons(word)
            lines += ["", f"## {word.capitalize()}", ""] * bool(reasons)
            lines += [f"- {count} cases: {reason}" for reason, count in reasons]
        return "\n".join(lines) + "\n"

    def summary(self) -> str:
        counts = Counter(result.word for result in self.results)
        said = ", ".join(f"{counts[word]} {word}" for word in (*Outcome, NOT_CLAIMED) if counts[word])
        return f"{self.platform}: {said or 'no cases'}"


# Field of the manifest -> what of it a case that passes has shown.
CLAIMS: dict[str, Callable[[Case], tuple[Any, ...]]] = {
    "ops": lambda case: (case.op,) if case.law == "ops" else (), "features": lambda case: case.needs.features,
    "formats": lambda case: (case.format,), "compute_dtypes": lambda case: (case.dtype,),
    "kv_dtypes": lambda case: (case.needs.kv,), "page_sizes": lambda case: (case.needs.page_size,)}


def never_shown(name: str, word: Any, results: Sequence[Result]) -> str:
    """What to say of a claim whose cases came out like this; "" when it is shown."""
    passed = {r.case.law for r in results if r.outcome is Outcome.PASSED and (name != "formats" or r.kept)}
    lacking = {"ops", "model"} - passed if name == "compute_dtypes" else set() if passed else {""}
    if not lacking:
        return ""
    laws = "of the law " + " and ".join(sorted(lacking)) + " " if "" not in lacking else ""
    reasons = Counter(r.reason or "expanded at load" for r in results if r.case.law in lacking or "" in lacking)
    told = [reason for reason, _ in reasons.most_common(1)]
    why = f"no case {laws}passed, of {reasons.total()}: {told[0]}" if told else f"there is no case {laws}for it"
    return f"claimed but never shown: {name} {word!r} ({why})"


def cell(counts: Mapping[str, int] | None) -> str:
    """"12", "12, 1 wrong", "unsupported": what one cell of the grid says."""
    if not counts:
        return "-"
    if set(counts) <= {Outcome.UNSUPPORTED, NOT_CLAIMED}:
        return Outcome.UNSUPPORTED.value if Outcome.UNSUPPORTED in counts else NOT_CLAIMED
    passed = counts.get(Outcome.PASSED, 0)
    others = [f"{count} {word}" for word, count in counts.items()
              if word not in (Outcome.PASSED, Outcome.UNSUPPORTED, NOT_CLAIMED)]
    skipped = counts.get(Outcome.UNSUPPORTED, 0)
    total = f"{passed}/{passed + skipped}" if skipped else str(passed)
    return ", ".join([total, *others])


def manifest_data(manifest: Any, ops: Iterable[str] = ()) -> dict[str, Any]:
    """A manifest as plain data, and the ops that its file offers."""
    plain = asdict(manifest)
    return plain | {"ops": list(ops), "features": sorted(plain["features"]), "details": dict(plain["details"])}


def worst(results: Iterable[Result], count: int = 5) -> list[Result]:
    """The results that took longest."""
    return sorted(results, key=lambda result: -result.seconds)[:count]
