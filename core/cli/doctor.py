"""`isthmus doctor`: what can run here, and the way out where something cannot. What it finds never makes it fail."""
from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform as machine
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..config import PlatformSettings
from ..env import cache_dir
from ..errors import cut
from ..settings import Resolved, suggest
from .banner import count, size
from .version import isthmus_version

LIBRARIES = ("numpy", "msgspec", "pyzmq", "starlette", "uvicorn", "tokenizers", "jinja2", "huggingface-hub",
             "torch", "jax", "mlx")
MAX_REASON = 4000  # characters of one platform's reason; all of it is in --json
MAX_PLATFORMS = 12
COLUMNS = 40, 120  # lines are as long as the terminal is wide, within these
MAX_SECONDS = 300  # of all probes
TRIAL = """
import faulthandler, json, sys
path, name, seconds = json.loads(sys.argv[1])
sys.path[:] = path
from isthmus.core.discovery import probe_all
faulthandler.enable()
faulthandler.dump_traceback_later(seconds, exit=True)
probe_all(None, [name])
print("lived")
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--bug-report", action="store_true", help="print what to paste into an issue; keys are hidden")


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    """0 when the platform that was asked for can run, or any where none was; else 1."""
    report = examine(resolved.config.platform)
    if arguments.json:
        print(json.dumps(report, ensure_ascii=False))
    elif arguments.bug_report:
        from .bug_report import text
        print(text(lines(report, None), resolved))
    else:
        print("\n".join(lines(report, _columns())))
    return 0 if report["chosen"] else 1


@contextmanager
def _watched() -> Iterator[None]:
    """A probe inside that crashes, or never ends, is known by its lines, which are all that is left to say then."""
    if sys.__stderr__ is None:
        yield
        return
    if not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)
    faulthandler.dump_traceback_later(MAX_SECONDS, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def examine(settings: PlatformSettings) -> dict[str, Any]:
    """Everything that doctor knows, as plain data."""
    return {"isthmus": isthmus_version(), "python": machine.python_version(), "system": machine.platform(),
            "cpus": _processors(), "memory": _safely(_memory),
            "libraries": {name: _safely(lambda name=name: version(name)) for name in LIBRARIES},
            "cache": str(cache_dir()), **_platforms(settings)}


def _safely(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except PackageNotFoundError:
        return None
    except Exception as error:  # a broken part of this machine is a finding, not a crash
        return f"broken: {type(error).__name__}: {error}"


def _processors() -> int | None:
    """Those that this process may use, where the system says that."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count()


def _memory() -> dict[str, int]:
    import psutil
    memory = psutil.virtual_memory()
    return {"total": memory.total, "free": memory.available}


def _platforms(settings: PlatformSettings) -> dict[str, Any]:
    """Every platform's manifest in short, or its reason; the one asked for; and the one that would be taken."""
    from ..discovery import probe_all
    from ..platform_options import platform_options
    asked = None if settings.platform == "auto" else settings.platform
    options = platform_options(settings.platform_option)
    try:
        names, fatal = _tried()
        with _watched():
            probed = probe_all({} if asked else options, *([names] if fatal else []))
    except Exception as error:  # such as two packages that claim one name
        return {"platforms": {}, "asked": asked, "chosen": None, "problem": str(error)}
    found = {name: _finding(answer) for name, answer in probed.items()} | fatal
    if asked and asked not in found:
        found[asked] = {"available": False, "reason": f"not installed{suggest(asked, found)}"}
    elif asked and options and asked not in fatal:
        with _watched():
            found[asked] = _finding(probe_all(options, [asked])[asked])
    _add_offers(found)
    usable = [name for name, entry in found.items() if entry["available"] and asked in (None, name)]
    chosen = max(usable, key=lambda name: (found[name]["rank"], name), default=None)
    return {"platforms": found, "asked": asked, "chosen": chosen, "problem": None}


def _tried() -> tuple[list[str], dict[str, Any]]:
    """Names of the platforms that can be probed here, and findings for those of packages that ended, or held up, a
    process that tried it."""
    from ..discovery import list_platforms
    names, fatal = [], {}
    for name, found in list_platforms().items():
        reason = None if found.entry is None or found.problem else _last_words(name)
        if reason is None:
            names.append(name)
        else:
            fatal[name] = {"available": False, "broken": True, "reason": f"its probe ends the process: {reason}"}
    return names, fatal


def _last_words(name: str) -> str | None:
    """How a process of its own ended that probed this platform; None when it lived on. Its traceback is shown."""
    child = subprocess.run([sys.executable, "-c", TRIAL, json.dumps([sys.path, name, MAX_SECONDS])], text=True,
                           errors="replace", stdin=subprocess.DEVNULL, capture_output=True)
    if child.stdout.endswith("lived\n"):
        return None
    print(child.stderr, end="", file=sys.stderr)
    code = child.returncode
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _finding(answer: Any) -> dict[str, Any]:
    """A manifest, or the exception in its place, as plain data."""
    if isinstance(answer, Exception):
        from ..discovery import told
        from ..registry import RegistrationError
        return {"available": False, "broken": isinstance(answer, RegistrationError),
                "reason": " ".join(told(answer).split())}
    return {"available": True, "device": answer.device, "dtypes": answer.compute_dtypes, "rank": answer.rank,
            "memory_free": answer.memory_free, "details": dict(answer.details)}


def _add_offers(found: Mapping[str, dict[str, Any]]) -> None:
    """What each platform that cannot run here would offer, by its manifest file, and what is wrong with a file."""
    import msgspec

    from ..manifests import Claim, read_claims
    for name, claim in read_claims().items():
        if name in found and not isinstance(claim, Claim):
            if found[name].get("reason") != str(claim):
                found[name]["manifest_problem"] = str(claim)
        elif name in found and not found[name]["available"]:
            found[name]["offers"] = msgspec.to_builtins(claim)


def _columns() -> int | None:
    """Where lines end on a terminal, or where COLUMNS says so; None in a pipe, where people search lines."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return None
    return max(COLUMNS[0], min(shutil.get_terminal_size().columns, COLUMNS[1]))


def lines(report: dict[str, Any], columns: int | None = None) -> list[str]:
    """The report for people. columns: a text that is longer goes on below, under its own beginning; None = it does not.

    Words are kept whole, so that what is to be typed can be copied.
    """
    memory = report["memory"]
    space = f"{size(memory['free'])} of {size(memory['total'])} free" if isinstance(memory, dict) else memory
    out = [("", f"isthmus {report['isthmus']}, Python {report['python']}, {report['system']}"),
           ("", f"{count(report['cpus'] or 0, 'processor')}, memory {space}"),
           ("", "platforms (* would be taken, + can run too, - cannot run here):")]
    out += _platform_lines(report)
    libraries = report["libraries"]
    out.append(("libraries: ", ", ".join(f"{n} {v}" for n, v in libraries.items() if v)))
    if missing := [n for n, v in libraries.items() if not v]:
        out.append(("", f"not installed, and needed only by platforms that compute with them: {', '.join(missing)}"))
    out.append(("", f"downloads are kept in {report['cache']} (ISTHMUS_CACHE)"))
    absent = [name for name, entry in report["platforms"].items() if "offers" in entry]
    if absent:
        out.append(("", f"what one that cannot run here would offer: isthmus explain --platform {absent[0]}"))
    return [line for label, text in [*out, ("", _verdict(report))] for line in _broken(label, text, columns)]


def _broken(label: str, text: str, columns: int | None) -> list[str]:
    if columns is None:
        return [label + text]
    return textwrap.wrap(text, columns, initial_indent=label, subsequent_indent=" " * max(2, len(label)),
                         break_long_words=False, break_on_hyphens=False)


def _platform_lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Mark and name, and what there is to say."""
    asked, entries = report["asked"], report["platforms"]
    names = sorted(entries, key=lambda n: (n != asked, not entries[n]["available"], n))
    width = max(map(len, names), default=0)
    out = []
    for name in names[:MAX_PLATFORMS]:
        entry = entries[name]
        if entry["available"]:
            mark = "*" if name == report["chosen"] else "+"
            text = f"{entry['device']}; {', '.join(entry['dtypes'])}; {size(entry['memory_free'])} free{_limits(entry)}"
        else:
            mark = "-"
            text = _offered(entry) + cut(entry["reason"].removeprefix(f"platform {name!r}: "), MAX_REASON)
        problem = f"; {entry['manifest_problem']}" if "manifest_problem" in entry else ""
        out.append((f"  {mark} {name:{width}}  ", f"{text}{problem}{' (asked for)' if name == asked else ''}"))
    if len(names) > MAX_PLATFORMS:
        out.append(("    ", f"and {len(names) - MAX_PLATFORMS} more: isthmus doctor --json"))
    return out


def _offered(entry: dict[str, Any]) -> str:
    offers = entry.get("offers")
    why = "broken: " if entry.get("broken") else "not here: " if offers else ""
    return (f"for {offers['devices']}, {', '.join(offers['compute_dtypes'])}; " if offers else "") + why


def _limits(entry: dict[str, Any]) -> str:
    """What a platform that is no peer of the others is good for, by its rank."""
    if entry["rank"] > 0:
        return ""
    return "; slow, to compare with" if entry["rank"] == 0 else "; makes words up, for tests of the server"


def _verdict(report: dict[str, Any]) -> str:
    asked, chosen = report["asked"], report["chosen"]
    command = "isthmus serve" + (f" --platform {asked}" if asked else "")
    if chosen:
        return f"ready: `{command}` runs on {chosen}{_limits(report['platforms'][chosen])}"
    if asked and report["platforms"]:
        others = [n for n, e in report["platforms"].items() if e["available"] and e["rank"] >= 0]
        return f"`{command}` cannot run here; what can: {', '.join(others) or 'nothing'}"
    return (f"no platform can run here: {report['problem'] or 'see the reasons above'}; "
            "`pip install \"isthmus[cpu]\"` gives one that runs everywhere")
