"""A recording run again through the real engine: its inputs come from the file, its decisions are compared with it.

No model and no hardware are needed: the null platform takes the batches and checks them, whatever platform the
recording was made on, and the results are the recorded ones.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ..config import Config
from ..discovery import load_platform
from ..engine import EngineCore
from ..grammar.contract import Matcher
from ..messages import Submit
from ..models.loader import LoadedModel
from ..plan import Batch, Out, StepResult
from ..speculation.contract import Drafter, Proposals, View
from ..startup import Loaded
from .entries import (
    CALLS,
    Aborted,
    Answered,
    Commanded,
    Drafted,
    Entry,
    Failure,
    Memory,
    Now,
    Planned,
    Result,
    Stepped,
    Submitted,
    planned,
    unpack_result,
)
from .file import Header, Recording, RecordingError

DEVICE = "null"  # the platform that needs no device
COARSE = 64      # looks at the ledger over the whole recording; between two of them it is looked at after every step

MOST_OF_SIZES = {"page_size": 2**16, "pages": 2**28, "max_model_len": 2**30, "max_running": 2**16, "chunk": 2**30}
MOST_TOKEN_IDS = 2**28


class Difference(BaseException):
    """The rerun is not what was recorded. No `Exception`: the engine takes those for failures of the device."""

    def __init__(self, step: int, what: str):
        super().__init__(f"step {step}: {what}")
        self.step, self.what = step, what


class _Cut(BaseException):
    """The recording ends within a call."""


class StepFailed(Exception):
    """A failure of the device that was recorded."""


@dataclass
class Outcome:
    """What a rerun came to. broken: the first thing that is wrong, at step `step`; "" when all is as recorded.
    cut: the recording's last frame was being written when the process ended. proved: steps after which the ledger of
    pages was proved."""

    steps: int = 0
    entries: int = 0
    broken: str = ""
    step: int = 0
    stats: dict[str, Any] | None = None
    cut: bool = False
    proved: int = 0


class Script:
    """A recorder's other side: gives an engine what was recorded, and raises `Difference` where it asks for, or
    decides, anything else."""

    def __init__(self, entries: Iterator[Entry]):
        self._entries = entries
        self.step = self.count = 0
        self.error: RecordingError | None = None  # what ends the recording before its end
        self._call: Entry | None = None           # the one that is going on
        self._next: Entry | None = None
        self._advance()

    def call(self) -> Entry | None:
        """The call that comes next; None at the end."""
        if self._next is not None and not isinstance(self._next, CALLS):
            raise self._difference(f"the engine did not ask for: {self._next}")
        return self._next

    def submitted(self, request: Submit) -> None:
        self._same(Submitted(request))

    def aborted(self, ids: tuple[str, ...], reason: str) -> None:
        self._same(Aborted(ids, reason))

    def commanded(self, name: str, arguments: dict[str, Any]) -> None:
        self._same(Commanded(name, arguments))

    def stepped(self) -> None:
        self._same(Stepped())

    def now(self) -> float:
        return self._take(Now, "the clock").at

    def memory(self, read: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        found = self._take(Memory, "the device's memory")
        return found.total, found.free

    def grammars(self, make: Callable[[], Any]) -> Any:
        return Recorded()

    def answered(self, read: Callable[[], bytes]) -> bytes:
        return self._take(Answered, "what grammars say").said

    def drafter(self, make: Callable[[], Any]) -> Any:
        return Silent()

    def drafted(self, read: Callable[[], bytes]) -> bytes:
        return self._take(Drafted, "drafts").said

    def launch(self, plan: Any, batch: Batch, cache: Any, run: Callable[[], tuple[Out, Any]]) -> tuple[Out, Any]:
        self.step = plan.step
        self._same(planned(plan, batch, cache))
        if isinstance(self._next, Failure) and self._next.where == "launch":
            raise StepFailed(self._take(Failure, "a failure").message)
        out, state = run()
        return _Fed(out, self), state

    def result(self) -> StepResult:
        """What was collected at this place. Raises `StepFailed` where that failed."""
        entry = self._take(Result | Failure, "a step's result")
        if isinstance(entry, Failure):
            raise StepFailed(entry.message)
        return unpack_result(entry)

    def flush(self) -> None:
        """Nothing is written."""

    close = flush

    def tail(self, count: int = 0) -> str:
        """Where the rerun is."""
        return f"step {self.step} of a recording"

    def _difference(self, what: str) -> Difference:
        """Names the call in which it is, unless that is a step, whose number is told anyway."""
        call = self._call
        return Difference(self.step, what if call is None or isinstance(call, Stepped) else f"in `{call}`: {what}")

    def _take(self, kind: Any, words: str) -> Any:
        entry = self._next
        if entry is None:
            raise _Cut
        if not isinstance(entry, kind):
            raise self._difference(f"recorded is `{entry}`, the engine now asks for {words}")
        if isinstance(entry, CALLS):
            self._call = entry
        self._advance()
        self.count += 1
        return entry

    def _advance(self) -> None:
        try:
            self._next = next(self._entries, None)
        except RecordingError as error:  # which the engine must not take for the device's
            self._next, self.error = None, error

    def _same(self, entry: Entry) -> None:
        recorded = self._next
        if recorded is not None and recorded != entry:
            raise self._difference(differ(recorded, entry))
        self._take(type(entry), f"`{entry}`")


class Recorded(Matcher):
    """Grammars of a rerun, in place of a library: what they said is in the recording, so nobody asks them."""

    compiled, seconds = 0, 0.0

    def clone(self) -> Matcher:
        return self

    def close(self) -> None:
        """Nothing is open."""

    def fill(self, row: Any) -> None:
        raise AssertionError("a rerun asks no grammar: what it said is in the recording")

    rollback = fill

    def accept(self, token: int) -> bool:
        return True

    def forced(self) -> list[int]:
        return []

    def is_complete(self) -> bool:
        return False


class Silent(Drafter):
    """The drafter of a rerun: what was proposed is in the recording, so nobody asks it."""

    def __init__(self) -> None:
        """It needs nothing."""

    def propose(self, view: View) -> Proposals:
        raise AssertionError("a rerun asks no drafter: what it proposed is in the recording")


class _Fed:
    """A step whose result comes from the recording; the device's own only shows that it took the batch."""

    def __init__(self, out: Out, script: Script):
        self._out, self._script = out, script

    def collect(self) -> StepResult:
        step = self._script.step
        result = self._script.result()
        try:
            self._out.collect()
        except AssertionError as error:
            raise Difference(step, f"the {DEVICE} platform refuses the batch: {error}") from None
        return result


def differ(recorded: Entry, now: Entry, names: tuple[str, str] = ("recorded", "now")) -> str:
    """Words for the difference of two entries: the first field that differs, with both values."""
    if type(recorded) is type(now):
        for name in recorded.__struct_fields__:
            pair = [getattr(entry, name) for entry in (recorded, now)]
            if pair[0] != pair[1]:
                if isinstance(recorded, Planned) and name == "decode":
                    pair = [list(memoryview(data).cast("i")) for data in pair]
                words = {"written": "the pages that are written"}.get(name, name)
                if isinstance(recorded, Submitted):
                    pair = [entry.request.id for entry in (recorded, now)]
                return (f"{words} of `{type(now).__struct_config__.tag}` differs: {names[0]} {_short(pair[0])}, "
                        f"{names[1]} {_short(pair[1])}")
    return f"{names[0]} `{recorded}`, {names[1]} `{now}`"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else text[:300] + "..."


def make_engine(header: Header, script: Script, platform: Any) -> EngineCore:
    """An engine of the recorded sizes on `platform`. It warms up as the recorded one did."""
    model = LoadedModel(None, {}, header.model, header.sizes.state.layers, [], header.weight_bytes, header.dtype)
    loaded = Loaded(platform, header.manifest, header.reason, Path(header.path), model, header.dtype, header.sizes,
                    header.overlap, {}, ())
    config = msgspec.convert(header.config, Config)
    # Nobody follows a rerun.
    config = replace(config, cache=replace(config.cache, kv_events=None, kv_events_replay=None))
    return EngineCore(config, loaded=loaded, recorder=script)


def _check_header(recording: Recording) -> None:
    """Raises `RecordingError` for sizes that no engine has."""
    header = recording.header
    found = {"vocab_size": header.model.vocab_size} | {name: getattr(header.sizes, name) for name in MOST_OF_SIZES}
    for name, value in found.items():
        most = MOST_OF_SIZES.get(name, MOST_TOKEN_IDS)
        if not 0 < value <= most:
            raise RecordingError(f"{recording.path} is broken: its {name} is {value}, from 1 to {most} are possible")


def _engine_of(recording: Recording, script: Script, platform: Any) -> EngineCore:
    """`make_engine`. Raises `RecordingError` for a header that no engine has."""
    try:
        return make_engine(recording.header, script, platform)
    except Exception as error:  # whatever a broken header leads to
        raise RecordingError(f"{recording.path} is broken: its header makes no engine: {type(error).__name__}: "
                             f"{error}") from error


def rerun(path: Path, until: int | None = None, check: bool = True,
          looks: Callable[[int], bool] = lambda step: False) -> Outcome:
    """Run a recording again, up to step `until`; `check`: the null platform looks at every number of every batch;
    `looks`(step): is the ledger to be proved after it? Raises `RecordingError` for a file that is none or broken."""
    with Recording(path) as recording:
        _check_header(recording)
        script = Script(recording.entries())
        vocab = recording.header.model.vocab_size
        platform = load_platform(DEVICE, {"check": str(int(check)), "vocab": str(vocab)})
        outcome, engine = Outcome(), None
        try:
            with suppress(_Cut):
                engine = _engine_of(recording, script, platform)
                _carry_out(engine, script, until, looks, outcome)
            outcome.stats = engine and engine.stats()
        except Difference as difference:
            outcome.broken, outcome.step = difference.what, difference.step
        finally:
            platform.close()
        if script.error:
            raise script.error
        outcome.steps, outcome.entries, outcome.cut = script.step, script.count, recording.cut
        return outcome


def _carry_out(engine: EngineCore, script: Script, until: int | None, looks: Callable[[int], bool],
               outcome: Outcome) -> None:
    """All calls of a recording, or those before step `until` is launched."""
    while (call := script.call()) is not None and (until is None or script.step < until):
        before = script.step
        if isinstance(call, Stepped):
            engine.step()
        else:
            with suppress(Exception):  # it was refused when it was recorded too, else the next entry differs
                _ask(engine, call)
        if script.step != before and looks(script.step):
            try:
                engine.scheduler.verify()
            except AssertionError as error:
                raise Difference(script.step, f"the ledger is broken: {error}") from None
            outcome.proved += 1


def _ask(engine: EngineCore, call: Entry) -> None:
    if isinstance(call, Submitted):
        params = call.request.params
        engine.enter(call.request, Recorded() if params.grammar is not None or params.controls is not None else None)
    elif isinstance(call, Aborted):
        engine.abort(call.ids, call.reason)
    elif isinstance(call, Commanded):
        engine.command(call.name, **call.arguments)


def bisect(path: Path, check: bool = True) -> Outcome:
    """The first step after which the ledger is broken, by two runs: one that looks now and then, one that looks after
    every step since the last good look."""
    with Recording(path) as recording:
        last = max((entry.step for entry in recording.entries() if isinstance(entry, Planned)), default=0)
    stride = max(1, last // COARSE)
    found = rerun(path, None, check, lambda step: step % stride == 0 or step == last)
    if not found.broken:
        return found
    good = (found.step - 1) // stride * stride
    return rerun(path, None, check, lambda step: step > good)


def against(path: Path, other: Path) -> Outcome:
    """The first entry in which two recordings differ. Times do not count."""
    step = count = 0
    with Recording(path) as first, Recording(other) as second:
        for name in ("sizes", "overlap", "model"):
            if getattr(first.header, name) != getattr(second.header, name):
                return Outcome(0, 0, f"the engines have other {name}", 0)
        ours, theirs = (filter(lambda e: not isinstance(e, Now), r.entries()) for r in (first, second))
        while True:
            a, b = next(ours, None), next(theirs, None)
            if a is None and b is None:
                return Outcome(step, count)
            count += 1
            if a is None or b is None:
                over = path if a is None else other
                return Outcome(step, count, f"{over} ends, the other goes on with {a or b}", step)
            step = a.step if isinstance(a, Planned) else step
            if a != b:
                return Outcome(step, count, differ(a, b, (str(path), str(other))), step)
