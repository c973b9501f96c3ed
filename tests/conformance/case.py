"""What the suite is made of: a law has cases, a case needs capabilities and is run in a context.

A case never names a device. What it needs is a dtype, features of the manifest, a page size, ranks; whether a platform
has them is asked of its manifest and its `supports`.
"""
from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.platform import Manifest


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


@dataclass(frozen=True)
class Needs:
    """Capabilities.

    dtype: that is computed in.  kv: is it K and V's too?  features: words of `core.platform.FEATURES`.
    asks:  ops as `Platform.supports(op, **case)` is asked.  page_size: tokens in a page.  buckets: of static sizes.
    """

    dtype: str
    kv: bool = False
    features: tuple[str, ...] = ()
    asks: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    page_size: int | None = None
    buckets: bool = False
    ranks: int = 1

    def words(self) -> tuple[str, ...]:
        """The same in words, for lists and the choice of tests."""
        extra = [f"kv {self.dtype}"] * self.kv + [f"pages of {self.page_size}"] * (self.page_size is not None)
        extra += ["buckets"] * self.buckets + [f"{self.ranks} ranks"] * (self.ranks > 1)
        return (self.dtype, *self.features, *extra)

    def missing(self, platform: Any, manifest: Manifest) -> str | None:
        """The reason why the platform does not claim this, or None. Ranks are found out by the case itself."""
        if self.dtype not in manifest.compute_dtypes:
            return f"{self.dtype} is not computed"
        if self.kv and self.dtype not in manifest.kv_dtypes:
            return f"K and V are not kept in {self.dtype}"
        if self.page_size is not None and self.page_size not in manifest.page_sizes:
            return f"pages of {self.page_size} tokens are not offered"
        if self.buckets and manifest.buckets is None:
            return "no buckets: every size is taken"
        for feature in self.features:
            reason = f"no {feature}" if feature not in manifest.features else platform.supports(feature)
            if reason:
                return reason
        return next(filter(None, (platform.supports(op, **case) for op, case in self.asks)), None)


@dataclass(frozen=True)
class Case:
    """One check of one law.

    id: "op[what,dtype]", unique, for people, ledgers and `--only`.  op: the row of the report's grid.
    check(context): returns, or raises `Wrong`; `Unsupported` where the platform says so only when it is tried.
    tolerance: largest normalised mean squared error, 0 where nothing is compared in figures.
    """

    id: str
    law: str
    op: str
    needs: Needs
    check: Callable[[Context], None]
    tolerance: float = 0.0

    @property
    def dtype(self) -> str:
        return self.needs.dtype

    def __str__(self) -> str:
        return self.id


@dataclass
class Context:
    """A probed platform and what the cases share.

    make: gives a fresh platform that was not probed yet; None where the suite was handed one object only.
    """

    platform: Any
    manifest: Manifest
    seed: int = 0
    make: Callable[[], Any] | None = None
    _kept: dict[Any, Any] = field(default_factory=dict)

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
