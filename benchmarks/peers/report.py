"""Markdown tables of what `compare.py` wrote:  python benchmarks/peers/report.py results.json [more.json ..]"""
from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from workloads import MAIN

TITLES = {"W1": "W1, single stream (128 in, 128 out)", "W2": "W2, 32 at once (256 in, 64 out)",
          "W3": "W3, 32 behind 1,500 shared tokens (8 at once, 32 out)", "W4": "W4, 8 conversations of 4 turns"}
COLUMNS = (("ttft_ms", "first token, ms", "{:.0f}"), ("hit_rate", "hit rate", "{:.2f}"),
           ("cpu_ms_token", "core ms a token", "{:.1f}"), ("other_cores", "others' cores", "{:.2f}"))
OURS = "isthmus"


def spread(values: list[float], form: str) -> str:
    """Median [least-most]."""
    if not values:
        return "-"
    if len(values) == 1:
        return form.format(values[0])
    return f"{form} [{form}-{form}]".format(statistics.median(values), min(values), max(values))


def figures(rounds: list[dict], case: str, workload: str, figure: str) -> list[float]:
    return [r[case][workload][figure] for r in rounds if figure in r.get(case, {}).get(workload, {})]


def ratios(rounds: list[dict], kind: str, name: str, workload: str) -> list[float]:
    """Ours over the peer's, round by round."""
    ours, theirs = ([r.get(f"{kind} {who}", {}).get(workload, {}).get(MAIN[workload]) for r in rounds]
                    for who in (OURS, name))
    return [a / b for a, b in zip(ours, theirs, strict=True) if a and b]


def tables(result: dict[str, Any]) -> list[str]:
    """The lines of every table."""
    rounds = result["rounds"]
    cases = list(dict.fromkeys(case for r in rounds for case in r))
    lines: list[str] = []
    for workload, title in TITLES.items():
        shown = [case for case in cases if figures(rounds, case, workload, MAIN[workload])]
        if not shown:
            continue
        lines += ["", f"**{title}**", "",
                  f"| class | engine | rounds | tokens/s | isthmus is | {' | '.join(c[1] for c in COLUMNS)} |",
                  "|---" * (5 + len(COLUMNS)) + "|"]
        for case in sorted(shown, key=lambda c: c.split(" ", 1)[0]):
            kind, name = case.split(" ", 1)
            main = figures(rounds, case, workload, MAIN[workload])
            ratio = "" if name == OURS else spread(ratios(rounds, kind, name, workload), "{:.2f}") + " times"
            rest = (spread(figures(rounds, case, workload, figure), form) for figure, _, form in COLUMNS)
            lines.append(f"| {kind} | {name} | {len(main)} | {spread(main, '{:.1f}')} | {ratio} | {' | '.join(rest)} |")
    return lines + once(rounds, cases)


def once(rounds: list[dict], cases: list[str]) -> list[str]:
    """What does not depend on the workload."""
    lines = ["", "| class | engine | perplexity | ready, s | resident, MiB |", "|---|---|---|---|---|"]
    for case in sorted(cases, key=lambda c: c.split(" ", 1)[0]):
        kind, name = case.split(" ", 1)
        of = [r[case] for r in rounds if case in r]
        told = next((r["perplexity"] for r in of if "perplexity" in r), "-")
        ready = spread([r["ready_s"] for r in of if "ready_s" in r], "{:.1f}")
        held = spread([r["resident"] / 2**20 for r in of if "resident" in r], "{:.0f}")
        errors = {r["error"] for r in of if "error" in r}
        lines.append(f"| {kind} | {name} | {told if isinstance(told, str) else f'{told:.3f}'} | {ready} | {held} |"
                     + "".join(f" <!-- failed: {error} -->" for error in errors))
    return lines


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print("\n".join(tables(json.loads(Path(path).read_text()))))
