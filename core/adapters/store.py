"""The adapters that an engine knows: read beside its loop, named, and brought to the device when requests want them."""
from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..config import AdapterSettings
from ..errors import CheckpointError, ConfigError, IsthmusError, RequestError, cut, shown
from ..models.loader import LoadedModel
from ..platform import Manifest, Unsupported
from ..specs import KV_FORMATS
from .peft import Adapter, read_adapter
from .slots import Slots
from .stacks import Placed, adaptable, most_bytes, place

log = logging.getLogger(__name__)

SLOTS = 4          # for adapters at once, where some are named and nothing else is said
LEAST_RANK = 16    # that there is room for
MOST_RANK = 512
LARGEST = {"f16": 65504.0}
_NAME = re.compile(r"[A-Za-z0-9][\w.:/@+-]{0,127}", re.ASCII)

Read = Callable[[str], Adapter]


@dataclass(frozen=True)
class Limits:
    """slots: for adapters on the device. rank: the largest there is room for. known: adapters that may be known."""

    slots: int = 0
    rank: int = 0
    known: int = 0


@dataclass
class Known:
    """One adapter under its name. leaving: no new request may name it, and it goes when the last one has ended."""

    number: int
    name: str
    path: str
    adapter: Adapter | None
    loaded: float
    leaving: bool = False

    def told(self) -> dict[str, Any]:
        """For the other processes."""
        return {"name": self.name, "number": self.number, "path": self.path, "loaded": self.loaded,
                "rank": self.adapter.rank if self.adapter else 0, "base": self.adapter.base if self.adapter else ""}


def named(entries: Sequence[str]) -> dict[str, str]:
    """Name -> path, of `--lora`. Raises `ConfigError`."""
    found: dict[str, str] = {}
    for entry in entries:
        name, sign, path = entry.partition("=")
        if not sign or not path.strip():
            raise ConfigError(f"--lora {cut(entry, 200)}: expected NAME=PATH, such as --lora sql=./sql-adapter")
        if name in found:
            raise ConfigError(f"--lora: the name {name!r} is given twice")
        try:
            found[check_name(name)] = path.strip()
        except RequestError as error:
            raise ConfigError(f"--lora: {error.message}") from None
    return found


def check_name(name: str, taken: Sequence[str | None] = ()) -> str:
    """The name of an adapter, as requests give it for `model`. Raises `RequestError`."""
    if not _NAME.fullmatch(name):
        raise RequestError(f"lora_name {shown(name)} is no name for an adapter: letters, digits and _ . : / @ + - are, "
                           "128 of them at most", param="lora_name", code="invalid_value")
    if name in taken or name == "default":
        raise RequestError(f"lora_name {name!r} is what the base model is called: choose another", param="lora_name",
                           code="invalid_value")
    return name


def wanted_slots(settings: AdapterSettings) -> int:
    """Slots that there are to be; 0 = no adapters are served."""
    asked = settings.max_loras
    return (SLOTS if settings.lora else 0) if asked is None else asked


class Prepared(NamedTuple):
    """What is known of adapters when a model is loaded. found: by the names of the settings. nbytes: that full slots
    may take over all ranks. read: what reads another one."""

    limits: Limits
    found: Mapping[str, Adapter]
    nbytes: int
    read: Read


def prepared(settings: AdapterSettings, model: LoadedModel, manifest: Manifest,
             fetch: Callable[[str], Path]) -> Prepared:
    """Raises `Unsupported` for a platform without adapters, `ConfigError`, and `CheckpointError` for a file that is
    none. fetch: from a name to its folder."""
    slots, names = wanted_slots(settings), named(settings.lora)
    if not slots:
        if names:
            raise ConfigError("--lora names adapters, and --max-loras 0 leaves no room for one: leave one out")
        return Prepared(Limits(), {}, 0, _refuse)
    if "adapters" not in manifest.features:
        raise Unsupported(f"--lora: {manifest.name} computes all rows of a batch with the same weights")
    if len(names) > settings.max_lora_adapters:
        raise ConfigError(f"--lora names {len(names)} adapters, at most {settings.max_lora_adapters} may be known "
                          "(--max-lora-adapters)")
    read = reader(model, settings.max_lora_rank or MOST_RANK, fetch)
    found = {name: read(path) for name, path in names.items()}
    rank = settings.max_lora_rank or max([LEAST_RANK, *(adapter.rank for adapter in found.values())])
    room = most_bytes(adaptable(model.layout), rank, slots, KV_FORMATS[model.dtype].value)
    return Prepared(Limits(slots, rank, settings.max_lora_adapters), found, room, reader(model, rank, fetch))


def reader(model: LoadedModel, rank: int, fetch: Callable[[str], Path]) -> Read:
    """What reads an adapter of at most this rank for the model."""
    shapes = adaptable(model.layout)
    return lambda path: read_adapter(fetch(path), shapes, rank, LARGEST.get(model.dtype, 3e38))


def place_as_told(model: LoadedModel, platform: Any, slots: Sequence[Sequence[str] | None]) -> Placed | None:
    """In another rank's process: load the adapters of all slots, each (folder, digest). Raises `CheckpointError` where
    a file is not what rank 0 has read."""
    read, found = reader(model, MOST_RANK, Path), []
    for told in slots:
        found.append(read(told[0]) if told else None)
        if told and found[-1].digest != told[1]:
            raise CheckpointError(f"{told[0]} has changed since it was read: load the adapter again")
    return place(model, platform, found, KV_FORMATS[model.dtype].value)


def _refuse(path: str) -> Adapter:
    raise ConfigError("there is no room for adapters")


class Adapters:
    """Known adapters, by number and by name, and the leaves of those in the slots.

    given: None in a rerun, which has neither files nor leaves. taken: names of the base model.
    placed: the model with the adapters, None while all slots are empty. stale: the leaves are not those of the slots.
    """

    def __init__(self, settings: AdapterSettings, given: Prepared | None, slots: Slots, model: LoadedModel,
                 platform: Any, taken: Sequence[str | None] = ()) -> None:
        self.limits = given.limits if given else Limits(slots.count, 0, settings.max_lora_adapters)
        self.slots, self._model, self._platform = slots, model, platform
        self._read, self._taken = given.read if given else None, taken
        self.placed: Placed | None = None
        self.seconds = 0.0
        self._known: dict[int, Known] = {}
        self._reading: dict[str, tuple[str, Future[Adapter]]] = {}
        self._worker: ThreadPoolExecutor | None = None
        for name, path in named(settings.lora).items():
            check_name(name, taken)
            number = len(self._known) + 1
            self._known[number] = Known(number, name, path, given.found[name] if given else None, time.time())
        for slot, number in enumerate(list(self._known)[:slots.count], 1):
            slots.put(number, slot)
        self.stale = bool(self._known)

    # ---- requests

    def check(self, number: int) -> None:
        """Raises the 404 for the number of an adapter that no new request may have."""
        if number and (number not in self._known or self._known[number].leaving):
            raise RequestError("this adapter was unloaded: GET /v1/models lists those that there are", status=404,
                               param="model", code="model_not_found")

    # ---- administration

    def list(self) -> list[dict[str, Any]]:
        """Those that requests may name, in the order of loading."""
        return [known.told() for known in self._known.values() if not known.leaving]

    def info(self) -> dict[str, Any]:
        """Of `EngineInfo`."""
        return {"adapters": tuple(self.list()), "max_loras": self.limits.slots, "max_lora_rank": self.limits.rank}

    def before(self, command: str, **arguments: Any) -> dict[str, Any] | None:
        """What of a command is no business of a recording: reading files, beside the loop. "read_adapter" begins it;
        "add_adapter" is answered {"reading": true} until it is done, and raises what is wrong with the files; with
        `give_up` nobody will come for it."""
        if self._read is None or command not in ("read_adapter", "add_adapter"):
            return None
        name, path, replace = arguments["lora"], arguments["path"], arguments.get("replace", 0.0)
        if command == "read_adapter":
            if name in self._reading and self._reading[name][1].done():  # nobody has come for it
                del self._reading[name]
            self._check_room(name, replace)
            self._begin(name, path)
            return {"reading": True}
        if arguments.get("give_up"):
            self._give_up(name, path)
            return {"reading": False}
        if self._reading.get(name, ("",))[0] != path:  # another load of the name began when this one was not looked at
            raise RequestError(f"adapter {name!r} is not being read from {shown(path)}: load it again", status=409,
                               param="lora_name", code="load_lost")
        future = self._reading[name][1]
        if not future.done():
            return {"reading": True}
        try:
            self._check_room(name, replace, 1)
            future.result()
        except (CheckpointError, ConfigError) as error:
            del self._reading[name]
            raise RequestError(f"adapter {name!r}: {error}", param="lora_path", code="invalid_value") from error
        except BaseException:
            del self._reading[name]
            raise
        return None

    def add(self, lora: str, path: str, number: float, replace: float = 0.0) -> dict[str, Any]:
        """Let requests name an adapter that was read, by a number that no other has had. One of the same name is
        replaced: it goes when its last request has ended, and the new one shares nothing with it."""
        if not self.slots.count or int(number) in self._known:
            raise ValueError(f"adapter {lora!r} cannot have the number {int(number)}")
        adapter = self._reading.pop(lora)[1].result() if self._read is not None else None
        self._leave(lora)
        self._known[int(number)] = Known(int(number), lora, path, adapter, time.time())
        return {"adapters": self.list()}

    def remove(self, lora: str) -> dict[str, Any]:
        """No new request may name it. requests: how many still use it."""
        found = any(known.name == lora for known in self._known.values())
        self._leave(lora)
        left = sum(self.slots.using(known.number) for known in self._known.values() if known.name == lora)
        return {"found": found, "requests": left, "adapters": self.list()}

    # ---- between steps

    def renew(self, now: Callable[[], float], scheduler: Any, steps: dict[Any, Any]) -> None:
        """Give slots to the adapters that are waited for. `steps` hold the leaves of all slots, so they are forgotten
        after a change, to be compiled anew; one in flight keeps its own. Requests of an adapter that cannot be placed
        are ended."""
        if not self.slots.count:
            return
        self._sweep()
        if self.slots.choose(now()) or self.stale:
            steps.clear()
            for number, why in self.place().items():
                waiting, running = scheduler.queue, [r for r in scheduler.table.owner if r is not None]
                scheduler.abort([r.id for r in (*waiting, *running) if r.adapter == number], "error", why)
                self.drop(number)

    def place(self) -> dict[int, str]:
        """Load the leaves of all slots anew; the old ones go first. -> the adapters for which that failed, with why:
        they have no slot and are not known any more."""
        self.placed, self.stale, failed = None, False, {}
        if self._read is None:
            return failed
        began = time.monotonic()
        try:
            self._place(self.slots.holds)
        except Exception as error:
            log.exception("adapters cannot be placed", exc_info=error)
            failed = self._without_the_faulty()
        self.seconds += time.monotonic() - began
        return failed

    def stats(self) -> dict[str, Any]:
        """Numbers as of now, and who runs and waits, for routers that keep an adapter's requests together."""
        names = {known.number: known.name for known in self._known.values()}
        busy = [number for number in self.slots.place if number and self.slots.running(number)]
        return {"lora_adapters": len(self.list()), "lora_slots": self.limits.slots,
                "lora_resident": len(self.slots.place) - 1, "lora_moves": self.slots.moves,
                "lora_place_seconds": self.seconds, "lora_bytes": self.placed.nbytes if self.placed else 0,
                "lora_waiting_requests": sum(count for number, count in self.slots.waiting.items()
                                             if number not in self.slots.place),
                "lora_running": [names[number] for number in busy if number in names],
                "lora_waiting": [names[number] for number in self.slots.waiting if number in names]}

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(wait=False, cancel_futures=True)

    # ---- inside

    def _begin(self, name: str, path: str) -> None:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "adapters")
        self._reading[name] = path, self._worker.submit(self._read, path)

    def _give_up(self, name: str, path: str) -> None:
        """Forget a load. If its files are being read that may never end: the others get another thread."""
        if self._reading.get(name, ("",))[0] != path:
            return
        _, future = self._reading.pop(name)
        if future.cancel() or future.done():
            return
        self._worker = None
        for other, (its, waiting) in list(self._reading.items()):
            if waiting.cancel():
                self._begin(other, its)

    def _named(self, name: str) -> list[Known]:
        return [known for known in self._known.values() if known.name == name and not known.leaving]

    def _leave(self, name: str) -> None:
        for known in self._named(name):
            known.leaving = True
        self._sweep()

    def _sweep(self) -> None:
        """Forget those that were unloaded and that no request uses any more."""
        for number in [n for n, known in self._known.items() if known.leaving and not self.slots.using(n)]:
            self.stale |= number in self.slots.place
            self.drop(number)

    def _check_room(self, name: str, replace: float, read: int = 0) -> None:
        if not self.limits.slots:
            raise RequestError("this server has no room for adapters: start it with --max-loras N, or --lora NAME=PATH",
                               status=400, code="lora_disabled")
        check_name(name, self._taken)
        if self._named(name) and not replace:
            raise RequestError(f"adapter {name!r} is loaded already: unload it first, or set load_inplace to true",
                               param="lora_name", code="already_loaded")
        if not read and name in self._reading:
            raise RequestError(f"adapter {name!r} is being loaded", status=409, param="lora_name",
                               code="being_loaded")
        if len(self._known) + len(self._reading) - read >= self.limits.known:
            raise RequestError(f"{len(self._known)} adapters are known, the limit is {self.limits.known} "
                               "(--max-lora-adapters): unload one", status=409, code="too_many_adapters")

    def _place(self, numbers: Sequence[int]) -> None:
        slots = [self._known[number].adapter if number else None for number in numbers[1:]]
        tell = getattr(self._platform, "place_adapters", None)
        if tell is not None:  # ranks in processes of their own
            tell([None if adapter is None else (str(adapter.path), adapter.digest) for adapter in slots])
        self.placed = place(self._model, self._platform, slots, KV_FORMATS[self._model.dtype].value)

    def _without_the_faulty(self) -> dict[int, str]:
        """Place those that can be, one after the other; what the others are told."""
        failed: dict[int, str] = {}
        kept = [0] * len(self.slots.holds)
        for slot, number in enumerate(list(self.slots.holds)):
            if number:
                try:
                    self.placed = None
                    self._place([*kept[:slot], number, *kept[slot + 1:]])
                    kept[slot] = number
                except Exception as error:
                    failed[number] = self._why_not(number, error)
        try:
            self.placed = None
            self._place(kept)
        except Exception as error:  # what went a moment ago may not go again
            self.placed = None
            failed |= {number: self._why_not(number, error) for number in kept if number}
        return failed

    def _why_not(self, number: int, error: Exception) -> str:
        why = str(error) if isinstance(error, IsthmusError | Unsupported) else type(error).__name__
        return f"adapter {self._known[number].name!r} cannot be placed: {cut(why, 500)}"

    def drop(self, number: int) -> None:
        """An adapter that cannot be placed, when no request uses it any more."""
        self.slots.forget(number)
        self._known.pop(number, None)
