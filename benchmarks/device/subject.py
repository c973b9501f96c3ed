"""Of what a device check is: platform, device and commit, found before the first step.

As a command it probes the platform, prints the answer as JSON, and ends with `NO_DEVICE` and the reason where it
cannot: without a driver that takes no torch, and so no seconds.
"""
from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
NO_DEVICE = 2  # exit status of what cannot run for want of a device, as the command `isthmus` has it
LIMIT = 30     # seconds for the probe
SOURCES = ("core", "platforms", "package", "benchmarks/device", "tests/triton", "tests/emulation")


class NoDevice(Exception):
    """The platform cannot be had here; the message is the platform's own reason."""


@dataclass(frozen=True)
class Subject:
    """What results are of; those of another one are others. commit: with a digest of what was changed since."""

    platform: str
    device: str
    emulated: bool
    commit: str

    @property
    def folder(self) -> str:
        """A name for a folder of its results."""
        words = (self.platform, self.device, "emulated" if self.emulated else "", self.commit)
        return "-".join(re.sub(r"[^0-9a-z]+", "-", word.lower()).strip("-")[:60] for word in words if word)


def commit() -> str:
    """The commit that lies here, "+" and a digest where tracked files differ from it; of the sources without git."""
    def git(*words: str) -> bytes:
        return subprocess.run(("git", *words), cwd=ROOT, check=True, capture_output=True, timeout=30).stdout
    try:
        name, changes = git("rev-parse", "HEAD").decode().strip()[:12], git("diff", "HEAD")
        return name + (f"+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else "")
    except (OSError, subprocess.SubprocessError):
        files = sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))
        return "sources " + hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def find(platform: str, tiny: bool, pause: Callable[[], None]) -> Subject:
    """Probe it in a process of its own. pause: a short sleep. Raises `NoDevice`, and what `pause` raises."""
    command = (sys.executable, str(HERE / "subject.py"), platform, *(["tiny"] if tiny else []))
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        ends = time.monotonic() + LIMIT
        try:
            while process.poll() is None and time.monotonic() < ends:
                pause()
        finally:
            late = process.poll() is None
            process.kill()
            process.wait()
        if late:
            raise NoDevice(f"the platform {platform} did not answer within {LIMIT} s")
        said.seek(0)
        lines = said.read().decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
    if process.returncode:
        raise NoDevice(lines[-1])
    return Subject(platform, json.loads(lines[-1])["device"], tiny, commit())


def main(name: str, *tiny: str) -> int:
    try:
        from isthmus.core.discovery import load_platform, probe
        from isthmus.core.platform import Unavailable
    except ModuleNotFoundError as error:
        print(f"{error} for {sys.executable}: pip install -e '.[{name},platform-test]' there, or name the Python of "
              "the platform's environment as PYTHON=...")
        return NO_DEVICE
    try:
        if tiny:
            from place import make_platform
            platform = make_platform(name, True)
        else:
            platform = load_platform(name)
        device = probe(name, platform).device
        platform.close()
        print(json.dumps({"device": device}))
    except Unavailable as error:
        print(error)
        return NO_DEVICE
    return 0


def stamp(subject: Subject) -> dict[str, object]:
    """What every file of results carries."""
    return asdict(subject)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
