"""A search for settings that serve a workload best: measured runs, one setting at a time, within a bounded time.

Every measurement is a line of a log. The search is a function of the measurements alone, so one that was stopped goes
on from its log without measuring anything twice.
"""
from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ..errors import ConfigError
from ..files import open_regular

SCREEN = 4          # of the requests, one in so many is sent first
HOPELESS = 0.8      # a screening that reaches less of the best's is not followed up
SLOWER = 2.0        # a run that takes so many times the best's seconds is stopped
SPARE_S = 5.0
PAIRS = 3           # of runs on the same prompts, in which a setting must win
OPTION = "platform_option:"
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Knob:
    """A setting, or a platform's option as `platform_option:name`, and its values in an order in which neighbours are
    alike."""

    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Trial:
    """A measurement. changes: settings that differ from where the search began.  part: "screen" or "whole".
    number: of the prompts.  score: 0 where it failed or was stopped, and `reason` says why.  platform: that it ran on.
    """

    changes: dict[str, Any]
    part: str
    number: int
    score: float
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    platform: str = ""


class OutOfTime(Exception):
    """No further measurement fits the time."""


class Log:
    """Trials on file, a line each behind one that says what they are of. Raises `ConfigError` for another's file."""

    def __init__(self, path: Path, about: Mapping[str, Any]):
        self.path, self.known = path, {}
        about = json.loads(json.dumps({"isthmus_tune": 1, **about}))
        lines, size = self._read(json.dumps(about) + "\n")
        if lines and lines[0] != about:
            differ = [key for key in about if lines[0].get(key) != about[key]]
            raise ConfigError(f"--state {path}: it is of another search ({', '.join(differ[:6])} differ): name another "
                              "file, or ask for the same")
        for line in lines[1:]:
            trial = Trial(**line)
            self.known[self._key(trial)] = trial
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._file.truncate(size)  # it may have been stopped while it wrote
        if not lines:
            self._write(about)

    def _read(self, head: str) -> tuple[list[Any], int]:
        """The lines that are whole, and their bytes. Nothing is written here: the file may be another's. head: how this
        search's log begins."""
        try:
            data = b""
            if self.path.exists():
                with open_regular(self.path) as file:
                    data = file.read()
            whole, end, cut = data.rpartition(b"\n")
            found = [json.loads(line) for line in whole.split(b"\n")] if end else []
            ours = isinstance(found[0], dict) and "isthmus_tune" in found[0] if found else head.encode().startswith(cut)
            if not ours:
                raise ValueError("it does not begin as one")
            for line in found[1:]:
                Trial(**line)
            return found, len(whole + end)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"--state {self.path}: it is no log of `isthmus tune`: {error}; name another "
                              "file") from None

    @staticmethod
    def _key(trial: Trial) -> str:
        return json.dumps([trial.changes, trial.part, trial.number], sort_keys=True)

    def find(self, changes: Settings, part: str, number: int) -> Trial | None:
        return self.known.get(self._key(Trial(dict(changes), part, number, 0.0)))

    def add(self, trial: Trial) -> None:
        self.known[self._key(trial)] = trial
        self._write(asdict(trial))

    def _write(self, value: Any) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


Measure = Callable[[Settings, str, int, float], Trial]


@dataclass
class Search:
    """measure(changes, part, number, limit in seconds) -> Trial; part "screen" sends a part of the requests.

    left(): seconds that are left.  gain: share by which a setting must be better to be taken.  tell: of each trial.
    """

    log: Log
    measure: Measure
    left: Callable[[], float]
    gain: float = 0.03
    tell: Callable[[Trial, str], None] = lambda trial, verdict: None
    best: dict[str, Any] = field(default_factory=dict)
    score: float = 0.0
    finished: bool = False
    _longest: dict[str, float] = field(default_factory=dict)

    def run(self, knobs: Callable[[str], Sequence[Knob]], start: dict[str, Any]) -> None:
        """Begin with `start`, the values of the settings as they are, and climb until no neighbour is better or the
        time is over. knobs: those of a platform; may add to `start`. Raises `ConfigError` when the beginning cannot be
        measured."""
        try:
            base = self._trial({}, "whole", 0)
            if base.reason:
                raise ConfigError(f"the settings to begin with cannot be measured: {base.reason}")
            self.score = base.score
            self.tell(base, "where it begins")
            self._climb(list(knobs(base.platform)), start)
            self.finished = True
        except OutOfTime:
            pass

    def _climb(self, knobs: list[Knob], values: dict[str, Any]) -> None:
        moved = True
        while moved:
            moved = False
            for knob in knobs:
                for step in (1, -1):
                    while self._move(knob, step, values):
                        moved = True

    def _move(self, knob: Knob, step: int, values: dict[str, Any]) -> bool:
        """Take the knob's next value in this direction if it is really better."""
        place = knob.values.index(values[knob.name]) + step
        if not 0 <= place < len(knob.values):
            return False
        changes = {**self.best, knob.name: knob.values[place]}
        if not self._better(changes):
            return False
        self.best, values[knob.name] = changes, knob.values[place]
        return True

    def _better(self, changes: dict[str, Any]) -> bool:
        """A part of the requests, then all, `PAIRS` times on other prompts, each beside the best so far on the same
        ones: who wins each time, and most times by `gain`, is taken."""
        screen, beside = self._trial(changes, "screen", 0), self._trial(self.best, "screen", 0)
        if screen.score < HOPELESS * beside.score or screen.reason:
            self.tell(screen, f"given up early: {screen.reason or 'far behind on a part of the requests'}")
            return False
        ratios, scores = [], []
        for number in range(PAIRS):
            trial, before = self._trial(changes, "whole", number), self._trial(self.best, "whole", number)
            least = 1 if number else 1 + self.gain  # most settings are no better: one run each is enough for them
            if trial.reason or trial.score <= before.score * least:
                self.tell(trial, trial.reason or f"not better{' on other prompts' if number else ''}")
                return False
            ratios.append(trial.score / before.score if before.score else math.inf)
            scores.append(trial.score)
        if statistics.median(ratios) <= 1 + self.gain:
            self.tell(trial, "not better by enough on other prompts")
            return False
        self.score = statistics.fmean(scores)
        self.tell(trial, "taken")
        return True

    def _trial(self, changes: Settings, part: str, number: int) -> Trial:
        known = self.log.find(changes, part, number)
        if known is not None:
            self._longest[part] = max(self._longest.get(part, 0.0), 0.0 if known.reason else known.seconds)
            return known
        left, longest = self.left(), self._longest.get(part, 0.0)
        if left <= longest:
            raise OutOfTime
        limit = min(left, SLOWER * longest + SPARE_S) if longest else left
        trial = self.measure(changes, part, number, limit)
        if trial.reason and limit == left:  # the time was over, which says nothing of the settings
            if self.left() <= 0:
                raise OutOfTime
        if not trial.reason:
            self._longest[part] = max(longest, trial.seconds)
        self.log.add(trial)
        return trial

    def tried(self) -> Iterator[Trial]:
        """All trials, in the order in which they were made."""
        yield from self.log.known.values()


def merged(base: Settings, changes: Settings) -> dict[str, Any]:
    """Settings as a file has them: options of the platform stand in a mapping of their own."""
    found = dict(base)
    options = dict(found.pop("platform_option", None) or {})
    for name, value in changes.items():
        if name.startswith(OPTION):
            options[name.removeprefix(OPTION)] = value
        else:
            found[name] = value
    return {**found, "platform_option": {k: str(v) for k, v in options.items()}} if options else found


def yaml_text(settings: Settings, comment: Sequence[str]) -> str:
    """The file that `isthmus serve --config` takes."""
    import yaml
    head = "".join(f"# {line}\n" for line in comment)
    return head + yaml.safe_dump(dict(settings), sort_keys=True, default_flow_style=False)
