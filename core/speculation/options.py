"""`--speculative`: which drafter, how many tokens, and the drafter's own options."""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..errors import SHOWN, ConfigError, cut
from ..suggest import suggest
from .contract import Drafter, Option, Word, load_drafter

TOKENS = Option(4, 1, 32, "drafted tokens of a request in one step at most")
ADAPTIVE = Option(1, 0, 1, "1: drafts get shorter, down to none, where they do not pay")
LABEL = "--speculative"


class Asked(NamedTuple):
    """The setting. options: the drafter's own that are given, as texts."""

    drafter: str
    tokens: int
    adaptive: bool
    options: Mapping[str, str]


def asked(items: Iterable[str]) -> Asked | None:
    """`ngram`, or `drafter=ngram,tokens=4` and the drafter's own options; None where nothing is asked for. Imports no
    drafter. Raises `ConfigError` that names the item and the way out."""
    given: dict[str, str] = {}
    for place, item in enumerate(items):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals and not place:
            name, value = "drafter", name
        elif not equals or not value:
            raise ConfigError(f"{LABEL}: {cut(item, SHOWN)!r} is not name=value, such as tokens={TOKENS.default}")
        if name in given:
            raise ConfigError(f"{LABEL}: {cut(name, SHOWN)} is given twice")
        given[name] = value
    if not given or given.get("drafter") == "none":
        return None
    if "drafter" not in given:
        raise ConfigError(f"{LABEL}: no drafter is named, such as drafter=ngram")
    drafter = given.pop("drafter")
    tokens, adaptive = (_number(name, given.pop(name, str(option.default)), option)
                        for name, option in (("tokens", TOKENS), ("adaptive", ADAPTIVE)))
    return Asked(drafter, tokens, bool(adaptive), given)


def options_of(setting: Asked) -> tuple[type[Drafter], dict[str, int | str]]:
    """The drafter's class, which is imported, and all of its options. Raises `ConfigError` as `asked` does."""
    kind = load_drafter(setting.drafter)
    for name in setting.options:
        if name not in kind.options:
            known = ["tokens", "adaptive", *kind.options]
            raise ConfigError(f"{LABEL}: the drafter {setting.drafter} has no option {cut(name, SHOWN)!r}"
                              f"{suggest(name, known)}; there are: {', '.join(known)}")
    found = {name: _value(setting, name, option) for name, option in kind.options.items()}
    if "longest" in setting.options and found.get("least", 0) > found["longest"]:
        raise ConfigError(f"{LABEL}: least={found['least']} is more than longest={found['longest']}, so that nothing "
                          "would be found: make least smaller or longest larger")
    return kind, found


def described(items: Iterable[str]) -> tuple[str, str]:
    """The setting for people: ("ngram, up to 4 tokens", how), or ("off", ""). Raises `ConfigError` as above."""
    setting = asked(items)
    if setting is None:
        return "off", ""
    options = options_of(setting)[1]
    how = "fewer where they do not pay" if setting.adaptive else "always"
    own = "".join(f", {name} {value}" for name, value in options.items() if value != "")
    return f"{setting.drafter}, {'up to ' if setting.adaptive else ''}{setting.tokens} tokens", f"{how}{own}"


def _value(setting: Asked, name: str, option: Option | Word) -> int | str:
    """What is given of an option, or its default."""
    if name in setting.options:
        return setting.options[name] if isinstance(option, Word) else _number(name, setting.options[name], option)
    if isinstance(option, Word) and option.default is None:
        raise ConfigError(f"{LABEL}: the drafter {setting.drafter} needs {name}=..., {option.help}")
    return option.default


def _number(name: str, value: str, option: Option) -> int:
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII) or not option.least <= int(value) <= option.most:
        raise ConfigError(f"{LABEL}: {name}={cut(value, SHOWN)} is no whole number from {option.least} to "
                          f"{option.most} ({option.help})")
    return int(value)
