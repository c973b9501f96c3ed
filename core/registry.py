"""Registries: one registration, one list that everything else derives from."""
from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from typing import Any


class RegistrationError(ValueError):
    """A name that is taken or reserved, or a contract with gaps; every gap is named at once."""


def signature_gaps(candidate: Any, contract: type, methods: tuple[str, ...],
                   optional: Collection[str] = ()) -> list[str]:
    """What a class or an object lacks of `contract`: methods, parameters or their order. Empty = complete.

    A method that is the contract's own, inherited, is missing. optional: parameters that may be, as "method.parameter".
    """
    gaps = []
    kind = candidate if isinstance(candidate, type) else type(candidate)
    for name in methods:
        ours, have = getattr(contract, name), getattr(candidate, name, None)
        if not callable(have) or getattr(kind, name, None) is ours:
            gaps.append(f"{name}{inspect.signature(ours)} is missing")
            continue
        try:
            got = inspect.signature(have).parameters
        except ValueError:  # of native code, which tells nothing
            continue
        want = dict(inspect.signature(ours).parameters)
        if kind is not candidate:
            del want["self"]
        open_ended = any(p.kind is p.VAR_KEYWORD for p in got.values())
        missing = [p for p in want if p not in got and not open_ended and f"{name}.{p}" not in optional]
        extra = [p.name for p in got.values() if p.name not in want and p.default is p.empty
                 and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        shared = [p for p in got if p in want]
        by_name = [p for p in shared if got[p].kind is got[p].KEYWORD_ONLY and want[p].kind is not got[p].kind]
        left_out = [p for p in shared if got[p].default is got[p].empty is not want[p].default]
        if missing:
            gaps.append(f"{name}() lacks the parameters {', '.join(missing)}")
        if extra:
            gaps.append(f"{name}() requires parameters that nobody passes: {', '.join(extra)}")
        if left_out:
            gaps.append(f"{name}() requires what may be left out: {', '.join(left_out)}")
        if by_name:
            gaps.append(f"{name}() takes by name only what is passed by position: {', '.join(by_name)}")
        elif shared != [p for p in want if p in got]:
            gaps.append(f"{name}() takes its parameters in another order: {', '.join(shared)}")
    return gaps


def is_name(name: str, reserved: Collection[str] = ("auto",)) -> bool:
    """May an implementation be called that: a word that stands for nothing else?"""
    return name not in reserved and name.replace("-", "").replace("_", "").isalnum()


class Registry:
    """Named implementations of one contract.

    kind: what the entries are, for messages ("scheduling policy").
    contract: a class whose methods named in `methods` every entry must have, with the same parameters.
    """

    def __init__(self, kind: str, contract: type, methods: tuple[str, ...], reserved: tuple[str, ...] = ("auto",)):
        self.kind, self.contract, self.methods, self.reserved = kind, contract, methods, reserved
        self._entries: dict[str, type] = {}

    def register(self, name: str, entry: type) -> type:
        """Add `entry` under `name`. Raises `RegistrationError` for a duplicate, a reserved name or any gap."""
        if not is_name(name, self.reserved):
            raise RegistrationError(f"{self.kind} name {name!r} is reserved or not a word")
        if name in self._entries:
            raise RegistrationError(f"{self.kind} {name!r} is registered already, by {self._entries[name].__module__}")
        gaps = signature_gaps(entry, self.contract, self.methods)
        if gaps:
            where = f"{entry.__module__}.{entry.__qualname__}"
            raise RegistrationError(f"{self.kind} {name!r} ({where}): " + "; ".join(gaps))
        self._entries[name] = entry
        return entry

    def create(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A new instance; an unknown name raises with the names there are."""
        if name not in self._entries:
            raise RegistrationError(f"unknown {self.kind} {name!r}; there are: {', '.join(sorted(self._entries))}")
        return self._entries[name](*args, **kwargs)

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
