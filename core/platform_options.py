"""Options of a platform (`--platform-option name=value`), checked before anything slow by what its file says of them;
the platform itself has the last word."""
from __future__ import annotations

import re

from .discovery import list_platforms
from .errors import ConfigError, shown
from .manifests import Claim, read_claim, read_claims
from .registry import RegistrationError
from .suggest import suggest


def platform_options(pairs: tuple[str, ...]) -> dict[str, str]:
    """("threads=8",) -> {"threads": "8"}. Raises `ConfigError` for what is not of that form."""
    options = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name.strip():
            raise ConfigError(f"--platform-option {shown(pair)} is not of the form key=value, such as threads=8")
        options[name] = value
    return options


def platforms_for(word: str) -> list[str]:
    """Platforms whose devices are called so, or whose title has the word."""
    claims = {name: claim for name, claim in read_claims().items() if isinstance(claim, Claim)}
    return [name for name, claim in claims.items()
            if word and re.search(rf"\b{re.escape(word)}s?\b", f"{claim.devices}, {claim.title}", re.IGNORECASE)]


def check_options(platform: str, pairs: tuple[str, ...]) -> None:
    """Raises `ConfigError` for an option, or a value of one, that the platform's file does not have. Imports no
    platform; for "auto", and without such a file, only the form is checked."""
    options, found = platform_options(pairs), list_platforms().get(platform)
    try:
        known = read_claim(found).options if options and found is not None else None
    except RegistrationError:  # whoever loads the platform is told
        return
    for name, value in options.items() if known is not None else ():
        about = f"--platform-option {shown(f'{name}={value}')}: "
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ConfigError(f"{about}the {platform} platform has no option {name[:40]}{suggest(name, known)}; {has}")
        if known[name] and not any(is_in(value, allowed) for allowed in known[name]):
            raise ConfigError(f"{about}{_wanted(known[name])} is needed")


def _range(allowed: str) -> tuple[str, str] | None:
    """("1", "8") for "1..8"."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)\.\.(-?\d+(?:\.\d+)?)", allowed)
    return (match[1], match[2]) if match else None


def is_in(value: str, allowed: str) -> bool:
    """Whether a value is the one that is allowed, or a number between "1..8", whole unless an end has a point."""
    if (ends := _range(allowed)) is None:
        return value == allowed
    kind = float if any("." in end for end in ends) else int
    try:
        number = kind(value)
    except ValueError:
        return False
    return kind(ends[0]) <= number <= kind(ends[1])


def _wanted(allowed: tuple[str, ...]) -> str:
    words = [f"a number from {ends[0]} to {ends[1]}" if (ends := _range(each)) else each for each in allowed]
    return words[0] if len(words) == 1 and _range(allowed[0]) else f"one of {', '.join(words)}"
