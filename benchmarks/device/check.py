"""Proves on a device what no other check can, in less than eight minutes and without a network.

Each step is a process of its own with a limit of time: what is timed runs alone, what is only right or wrong runs at
the same time, since it is compilers that this waits for. Results lie in a folder for each platform, device and commit
below --folder; a step that ended well there is not done again, so run it again to go on. One that fails, or is ended
at its limit, leaves what it had, and the rest go on. report.md and report.json tell all of it; those directly in
--folder are of the latest run.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import write_report, write_whole
from steps import GRACE, Step, run_steps, steps, together
from subject import NO_DEVICE, NoDevice, Subject, find, stamp

CHECKED = ("cuda", "rocm", "xpu", "npu")
STATUS = "steps.json"
PAUSE = 0.05    # seconds
ROOM = 4 << 20  # bytes that the folder must take before anything is run
FAILED, REFUSED = 1, 2
END = """exit status: 0 every step asked for is done, 1 one is not, 2 nothing could be run (no device, no folder),
128 and the signal's number if one ended it"""


class Stopped(BaseException):
    """A signal asks for the end."""


@contextmanager
def signals() -> Iterator[Callable[[], None]]:
    """A short sleep that raises `Stopped` after Ctrl-C or SIGTERM: nowhere else, so that no process is half known."""
    numbers, came = (signal.SIGINT, signal.SIGTERM), []

    def pause() -> None:
        if not came:
            time.sleep(PAUSE)
        if came:
            raise Stopped(came[0])
    before = [signal.signal(number, lambda signum, _: came.append(signum)) for number in numbers]
    try:
        yield pause
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def read_status(folder: Path, subject: Subject) -> dict[str, Any]:
    """What became of the steps of the same platform, device and commit."""
    try:
        found = json.loads((folder / STATUS).read_text("utf-8"))
        return found["steps"] if found["of"] == stamp(subject) else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def wanted(step: Step, named: Sequence[str], status: dict[str, Any], left: float) -> bool:
    """Whether it is to be run now; says why not, or for how long at most."""
    if named and step.name not in named:
        return False
    if not named and status.get(step.name, {}).get("outcome") == "done":
        print(f"{step.name}: done before")
        return False
    if left < GRACE:
        print(f"{step.name}: no time left; run it again to go on from here")
        return False
    print(f"{step.name}: at most {min(step.limit, left):.0f} s", flush=True)
    return True


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: a number of seconds, 0 or more, is needed")
    return value


def checked(platform: str) -> str:
    if platform not in CHECKED:
        raise argparse.ArgumentTypeError(f"{platform}: this checks {', '.join(CHECKED)}; `isthmus conformance "
                                         f"--platform={platform}` holds any other to the laws, on its device")
    return platform


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    names = [step.name for step in steps("cuda", Path(), False)]
    parser = argparse.ArgumentParser(
        prog="ci/device_check.sh", description=__doc__, epilog=f"steps: {', '.join(names)}\n\n{END}",
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", nargs="?", default="cuda", type=checked, metavar=f"{{{','.join(CHECKED)}}}",
                        help="whose device (%(default)s); any other: isthmus conformance --platform=NAME")
    parser.add_argument("--folder", type=Path, default=Path("device_check"), help="where the results go (%(default)s)")
    parser.add_argument("--device", choices=("own", "cpu"), default="own", help="cpu: emulated, tiny, a test")
    parser.add_argument("--seconds", type=seconds, default=475, help="for all of it (%(default)s)")
    parser.add_argument("--step", action="append", default=[], metavar="NAME",
                        help="this one alone, again if it was done; may be given more than once")
    given = parser.parse_args(argv)
    known = [step.name for step in steps(given.platform, Path(), given.device == "cpu")]
    if unknown := set(given.step) - set(known):
        parser.error(f"there is no step {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    return given


def open_folder(folder: Path) -> None:
    """Make it, and see that it can be written to. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".room-{os.getpid()}"
    try:
        probe.write_bytes(bytes(ROOM))
    finally:
        probe.unlink(missing_ok=True)


def keep(top: Path, subject: Subject, names: Sequence[str], status: dict[str, Any], reason: str = "") -> None:
    """steps.json and the reports as they are now, in the subject's folder; the reports at the top too."""
    folder = top / subject.folder
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / STATUS, json.dumps({"of": stamp(subject), "steps": status}, indent=1) + "\n")
    for place in (folder, top):
        write_report(place, folder, subject, names, status, reason)


def check(given: argparse.Namespace, ends: float, pause: Callable[[], None]) -> int:
    top, tiny = given.folder.absolute(), given.device == "cpu"
    open_folder(top)
    try:
        subject, reason = find(given.platform, tiny, pause), ""
    except NoDevice as error:
        subject, reason = Subject(given.platform, "no device", tiny, ""), str(error)
    folder = top / subject.folder
    todo = steps(given.platform, folder, tiny)
    names, status = [step.name for step in todo], {} if reason else read_status(folder, subject)
    keep(top, subject, names, status, reason)
    if reason:
        print(f"nothing was run: {reason}\nsee {folder / 'report.md'}", file=sys.stderr)
        return NO_DEVICE
    print(f"{subject.platform} on {subject.device}{', emulated' if tiny else ''}, at {subject.commit}", flush=True)
    for group in together(todo):
        left = ends - time.monotonic() - GRACE
        chosen = [step for step in group if wanted(step, given.step, status, left)]
        try:
            run_steps(chosen, folder, subject, left, status, pause)
        finally:
            keep(top, subject, names, status)
    print(f"see {folder / 'report.md'}")
    asked = given.step or names
    return 0 if all(status.get(name, {}).get("outcome") == "done" for name in asked) else FAILED


def main(argv: Sequence[str]) -> int:
    given = arguments(argv)
    ends = time.monotonic() + given.seconds
    with signals() as pause:
        try:
            return check(given, ends, pause)
        except Stopped as stopped:
            print("device_check: interrupted; run it again to go on from here", file=sys.stderr)
            return 128 + stopped.args[0]
        except OSError as error:
            print(f"device_check: --folder {given.folder} cannot take the results: {error.strerror or error}",
                  file=sys.stderr)
            return REFUSED


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
