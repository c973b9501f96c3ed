"""What a drafter is: it guesses what comes next in running requests, and one step of the model checks the guesses.

A guess is never believed. At each place of a draft the model draws its own token as it would have without a draft, with
the same mask, bias, penalties and random number, and a drafted token is kept where it is that token
(`core.speculation.accept`). So a drafter decides how fast an output comes, and nothing of what it says.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import numpy as np

from ..errors import ConfigError, said
from ..registry import RegistrationError, Registry, is_name, signature_gaps
from ..suggest import suggest
from . import PACKAGES

GROUP = "isthmus.drafters"
SHARED = ("drafter", "tokens", "adaptive")  # what `--speculative` says of any drafter


class Option(NamedTuple):
    """A whole number that `--speculative NAME=N` sets."""

    default: int
    least: int
    most: int
    help: str


class Word(NamedTuple):
    """A name or path that `--speculative NAME=TEXT` sets. default: where it need not be given."""

    help: str
    default: str | None = None


@dataclass(frozen=True)
class Setup:
    """What a drafter is made with.

    tokens: most that it is ever asked for, for one request.  options: its own, all of them.
    vocab_size, max_model_len, page_size: of the model and its cache.  seqs: sequence slots, slot 0 included.
    tree: the radix tree of cached text, read-only (`core.cache.radix`).
    device: for a drafter with `on_device` the engine, whose `launch_beside` runs a model of its own on the same state;
            None for others.  model: of such a one, what its `beside` has loaded (`core.speculation.companion`).
    """

    tokens: int
    vocab_size: int
    max_model_len: int
    page_size: int
    seqs: int
    options: Mapping[str, int | str] = field(default_factory=dict)
    tree: Any = None
    device: Any = None
    model: Any = None


class View(NamedTuple):
    """n requests that may go on with drafts: every token of theirs is known to the host, and the last one is not
    computed yet. All arrays are read-only, and hold until `propose` returns.

    slots: intp [n], sequence slots.  known: int32 [n], tokens of each, prompt and output.
    most: int32 [n], drafted tokens that are of use, at least 1.
    tokens: int32 [seqs, max_model_len]; those of request i are `tokens[slots[i], :known[i]]`.
    pages: int32 [seqs, P], pages of each slot; for a drafter with `on_device` also those of `most` drafted tokens.
    domains: of the radix tree, one for each request: text of other domains must not show in what is proposed.
    """

    slots: np.ndarray
    known: np.ndarray
    most: np.ndarray
    tokens: np.ndarray
    pages: np.ndarray
    domains: Sequence[bytes]


class Proposals(NamedTuple):
    """Chains of tokens, one for each request of a `View`: `counts` int32 [n], from 0 to what was asked for; `tokens`
    int32 [sum of counts], request after request, in order."""

    counts: np.ndarray
    tokens: np.ndarray


class Ways(NamedTuple):
    """The same of a drafter whose option `branches` is above 0: the ways through a tree, so many more than one for each
    request at most, the best first. owners: int32 [n], the request of each chain, ascending."""

    counts: np.ndarray
    tokens: np.ndarray
    owners: np.ndarray


class Drafter(ABC):
    """One for an engine, made with a `Setup`. Called on the engine's thread, between two steps: nothing may block.

    options: what may be set of it.  on_device: it computes with a model, and so is told of each launched step.
    A recording has what was proposed, so a rerun needs no drafter.
    """

    options: Mapping[str, Option | Word] = {}
    on_device: bool = False

    @abstractmethod
    def __init__(self, setup: Setup):
        """Raises `ConfigError` for a setup that it cannot work with."""

    @classmethod
    def beside(cls, loading: Any, options: Mapping[str, int | str]) -> Any:
        """For one with `on_device`: the `Companion` of `core.speculation.companion` that is loaded beside the model,
        which `loading` describes. Asked before any weight is read, and only of the class."""
        raise NotImplementedError(f"{cls.__name__} is on_device and has no beside()")

    @abstractmethod
    def propose(self, view: View) -> Proposals | Ways:
        """The next tokens, as far as it dares. One that raises ends speculation, not the engine."""

    def launched(self, plan: Any, batch: Any) -> None:  # noqa: B027  (it may be left as it is, as those below)
        """The model's step of this plan and batch (`core.scheduler.plans`, `core.plan`) is about to be launched: one
        with `on_device` computes the same tokens with its own model. Nobody else is told."""

    def settled(self, slots: np.ndarray, accepted: np.ndarray) -> None:  # noqa: B027
        """So many of the drafted tokens were accepted, int32 [n]; each request has one more token than that now."""

    def left(self, slot: int, tokens: np.ndarray, cached: int, domain: bytes) -> None:  # noqa: B027
        """A sequence slot's request has ended or gives way: what is kept for the slot is void.

        tokens: int32, its prompt and output, which stay in the cache; read-only, and only until return. The first
        `cached` of them were there before it. domain: of the radix tree.
        """

    def flushed(self) -> None:  # noqa: B027
        """The cache was emptied on purpose: nothing of its text may be kept."""


class Drafters(Registry):
    """The registry; it checks flags and what is optional too."""

    def register(self, name: str, entry: type) -> type:
        """Add `entry`. Raises `RegistrationError` for a duplicate, a reserved name or any gap in methods and flags."""
        gaps = _flag_gaps(entry) + _optional_gaps(entry)
        if gaps:
            gaps = signature_gaps(entry, self.contract, self.methods) + gaps
            where = f"{entry.__module__}.{getattr(entry, '__qualname__', entry)}"
            raise RegistrationError(f"{self.kind} {name!r} ({where}): " + "; ".join(gaps))
        return super().register(name, entry)

    def __getitem__(self, name: str) -> type[Drafter]:
        return self._entries[name]


def _flag_gaps(entry: type) -> list[str]:
    gaps, options = [], getattr(entry, "options", None)
    if not isinstance(getattr(entry, "on_device", None), bool):
        gaps.append("on_device is neither True nor False")
    beside = getattr(entry, "beside", None)
    if getattr(entry, "on_device", None) is True and (
            not callable(beside) or getattr(beside, "__func__", None) is Drafter.beside.__func__):
        gaps.append("it is on_device, and beside(loading, options) is missing")
    if not isinstance(options, Mapping):
        return [*gaps, "options is no mapping of names to `Option`s"]
    for name, option in options.items():
        if not isinstance(name, str) or not is_name(name, SHARED):
            gaps.append(f"the option {name!r} is reserved or not a word")
        elif not isinstance(option, Word) and not (
                isinstance(option, Option) and option.least <= option.default <= option.most):
            gaps.append(f"the option {name!r} is no `Option` whose default is between its bounds")
    return gaps


def _optional_gaps(entry: type) -> list[str]:
    optional = ("launched", "settled", "left", "flushed")
    return signature_gaps(entry, Drafter, tuple(
        name for name in optional if getattr(entry, name, None) is not getattr(Drafter, name)))


DRAFTERS = Drafters("drafter", Drafter, ("propose",), reserved=("auto", "none", "off"))


def known_drafters() -> tuple[str, ...]:
    """Names of all that can be asked for, without importing any."""
    return tuple(sorted({*PACKAGES, *DRAFTERS.names(), *(entry.name for entry in entry_points(group=GROUP))}))


def load_drafter(name: str) -> type[Drafter]:
    """Import and register one. Raises `ConfigError` for a name that nobody offers, and for what cannot be loaded."""
    if name in DRAFTERS.names():
        return DRAFTERS[name]
    if name in PACKAGES:
        import_module(PACKAGES[name], __package__)
        return DRAFTERS[name]
    offers: Collection[Any] = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    if not offers:
        names = known_drafters()
        raise ConfigError(f"--speculative drafter={name}: no such drafter is installed{suggest(name, names)}; there "
                          f"are: {', '.join(names)}")
    try:
        if len(offers) > 1:
            raise RegistrationError(f"{len(offers)} packages offer a drafter of this name")
        return DRAFTERS.register(name, next(iter(offers)).load())
    except (RegistrationError, Exception) as error:  # it is foreign code
        raise ConfigError(f"--speculative drafter={name}: it cannot be loaded: {said(error)}") from error

