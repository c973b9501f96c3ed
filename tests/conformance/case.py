"""What the suite is made of: a law has cases, a case needs capabilities and is run in a context.

A case never names a device. What it needs is a dtype, features of the manifest, a page size, ranks; whether a platform
has them is asked of its manifest and its `supports`.
"""
from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.plan import Batch, already
from ..core.platform import Manifest, RawTensor, Unsupported

ANY = "any"  # in place of a dtype: the case is about none


class Wrong(AssertionError):
    """The platform computed something else than the law says.

    nmse: normalised mean squared error, against `tolerance`. index: of the first value that is off by more than that.
    """

    def __init__(self, message: str, nmse: float | None = None, tolerance: float | None = None,
                 index: tuple[int, ...] | None = None):
        super().__init__(message)
        self.nmse, self.tolerance, self.index = nmse, tolerance, index

    def numbers(self) -> dict[str, Any]:
        """What is known in figures, as plain data."""
        known = {"nmse": self.nmse, "tolerance": self.tolerance, "index": self.index and [int(i) for i in self.index]}
        return {name: value for name, value in known.items() if value is not None}


class NotClaimed(Unsupported):
    """The case is about something that each platform chooses for itself (a dtype, a page size, ranks), and this one did
    not."""


@dataclass(frozen=True)
class Needs:
    """Capabilities.

    dtype: that is computed in, or `ANY`.  kv: of K and V, "" where they do not matter.
    features: words of `core.platform.FEATURES`.
    asks:  ops as `Platform.supports(op, **case)` is asked.  page_size: tokens in a page.  buckets: of static sizes.
    """

    dtype: str
    kv: str = ""
    features: tuple[str, ...] = ()
    asks: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    page_size: int | None = None
    buckets: bool = False
    ranks: int = 1

    def words(self) -> tuple[str, ...]:
        """The same in words, for lists and the choice of tests."""
        extra = [f"kv {self.kv}"] * bool(self.kv) + [f"pages of {self.page_size}"] * (self.page_size is not None)
        extra += ["buckets"] * self.buckets + [f"{self.ranks} ranks"] * (self.ranks > 1)
        return (self.dtype, *self.features, *extra)

    def missing(self, platform: Any, manifest: Manifest) -> str | None:
        """The reason why the platform lacks this, or None. Raises `NotClaimed`. Ranks are found out by the case itself.
        """
        if self.dtype not in (ANY, *manifest.compute_dtypes):
            raise NotClaimed(f"{self.dtype} is not computed")
        if self.kv and self.kv not in manifest.kv_dtypes:
            raise NotClaimed(f"K and V are not kept in {self.kv}")
        if self.page_size is not None and self.page_size not in manifest.page_sizes:
            raise NotClaimed(f"pages of {self.page_size} tokens are not offered")
        if self.buckets and manifest.buckets is None:
            raise NotClaimed("no buckets: every size is taken")
        for feature in self.features:
            reason = f"no {feature}" if feature not in manifest.features else asked(platform, feature)
            if reason:
                return reason
        return next(filter(None, (asked(platform, op, **case) for op, case in self.asks)), None)


def asked(platform: Any, op: str, **case: Any) -> str | None:
    """What `supports` says, which is None or a reason and nothing else."""
    answer = platform.supports(op, **case)
    if answer is None or isinstance(answer, str) and answer:
        return answer
    raise Wrong(f"supports({op!r}) returned {answer!r}: None (it can) or a text that says why not is needed")


@dataclass(frozen=True)
class Case:
    """One check of one law.

    id: "op[what,dtype]", unique, for people, ledgers and `--only`.  op: the row of the report's grid.
    check(context): returns, or raises `Wrong`; `Unsupported` where the platform says so only when it is tried.
    tolerance: largest normalised mean squared error, 0 where nothing is compared in figures.
    format: of the checkpoint, that a linear is about; it is shown where `supports` says that it is kept.
    """

    id: str
    law: str
    op: str
    needs: Needs
    check: Callable[[Context], None]
    tolerance: float = 0.0
    format: str = ""

    @property
    def dtype(self) -> str:
        return self.needs.dtype

    def __str__(self) -> str:
        return self.id


class Guarded:
    """A platform whose answers are looked at: what is of the wrong kind is named where it is returned, and what was
    handed in must be as it was."""

    def __init__(self, platform: Any):
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._platform, name)
        if name in ("alloc", "copy_pages", "import_pages"):
            return lambda *args, **kwargs: _state(name, value(*args, **kwargs))
        if name == "load":
            return lambda raws, *args, **kwargs: _loaded(value, raws, *args, **kwargs)
        if name == "compile":
            return lambda *args, **kwargs: _step(value(*args, **kwargs))
        return value


def _state(name: str, answer: Any) -> Any:
    if answer is None:
        raise Wrong(f"{name} returned None, a state is needed")
    return answer


def _loaded(load: Callable[..., Any], raws: list[RawTensor], *args: Any, **kwargs: Any) -> Any:
    parts = [part for raw in raws for part in (raw, *raw.extra)]
    before = [memoryview(part.data).tobytes() for part in parts]
    weight = load(raws, *args, **kwargs)
    if before != [memoryview(part.data).tobytes() for part in parts]:
        raise Wrong("load wrote into a tensor of the checkpoint: they are for reading only")
    return weight


def _arrays(part: Any, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Every array of a batch with its name."""
    for field_name, value in part._asdict().items():
        if field_name == "bits" and part.ready is not already:  # core writes them meanwhile
            continue
        if isinstance(value, np.ndarray):
            yield f"{name}{field_name}", value
        elif isinstance(value, tuple):
            yield from _arrays(value, f"{name}{field_name}.")


class _Watched:
    """A launched step. What it got in its batch must be the same when the step has been launched, and when it is done.
    """

    def __init__(self, batch: Batch):
        self._batch, self._before = batch, [(name, array.copy()) for name, array in _arrays(batch)]
        self._out: Any = None

    def launched(self, out: Any) -> _Watched:
        self._out = out
        self._check()
        return self

    def collect(self) -> Any:
        got = self._out.collect()
        self._check()
        return got

    def _check(self) -> None:
        for (name, now), (_, before) in zip(_arrays(self._batch), self._before, strict=True):
            if now.tobytes() != before.tobytes():
                raise Wrong(f"the step wrote into batch.{name}: what it gets is for reading only")


def _step(step: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    if not callable(step):
        raise Wrong(f"compile returned {_shown(step)}, a step that is called with (state, batch) is needed")

    def launch(state: Any, batch: Any) -> tuple[Any, Any]:
        watched = _Watched(batch)
        pair = step(state, batch)
        if not isinstance(pair, tuple) or len(pair) != 2 or not callable(getattr(pair[0], "collect", None)):
            raise Wrong(f"the step returned {_shown(pair)}, a pair is needed: an object with collect(), and the state")
        return watched.launched(pair[0]), _state("the step", pair[1])
    return launch


def _shown(answer: Any) -> str:
    if isinstance(answer, tuple):
        return f"a tuple of {len(answer)} ({', '.join(map(_shown, answer[:3]))})"
    return "None" if answer is None else f"a {type(answer).__name__}"


@dataclass
class Context:
    """A probed platform and what the cases share.

    make: gives a fresh platform that was not probed yet; None where the suite was handed one object only.
    name: that it was asked for by, "" where it was handed over.
    kind: the platform's class; `platform` itself is `Guarded`.
    """

    platform: Any
    manifest: Manifest
    seed: int = 0
    make: Callable[[], Any] | None = None
    name: str = ""
    kind: type = field(init=False)
    _kept: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kind, self.platform = type(self.platform), Guarded(self.platform)

    def once(self, key: Any, build: Callable[[], Any]) -> Any:
        """What `build` gave when it was first asked for under `key`; a failure is not kept."""
        if key not in self._kept:
            self._kept[key] = build()
        return self._kept[key]

    def forget(self, key: Any) -> None:
        """Build it anew when it is asked for again."""
        self._kept.pop(key, None)

    def close(self) -> None:
        """Let the platform go, and those of contexts made within this one."""
        for kept in self._kept.values():
            if isinstance(kept, Context):
                kept.close()
        self._kept.clear()
        getattr(self.platform, "close", lambda: None)()

    def page_size(self) -> int:
        """The smallest pages offered that hold four tokens or more, so that short contexts fill several."""
        sizes = self.manifest.page_sizes
        return min((size for size in sizes if size >= 4), default=max(sizes))


def random_source(seed: int, name: str) -> np.random.Generator:
    """Random numbers of one case: a function of the suite's seed and the case's name."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])
