"""Sampling options as flags and as words of a chat; the ranges are the server's own (`core.server.protocol`)."""
from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..suggest import suggest


class Option(NamedTuple):
    """What a sampling option takes and does; `help` has the range and, where it is off by default, how to say so."""

    kind: type
    help: str


OPTIONS = {
    "temperature": Option(float, "0 takes the likeliest token, higher is more varied; 0 to 2 [1]"),
    "top_p": Option(float, "sample from the likeliest tokens that make up this share; 0 to 1 [1]"),
    "top_k": Option(int, "sample from this many of the likeliest tokens; 0 = all [0]"),
    "min_p": Option(float, "leave out tokens less likely than this share of the likeliest; 0 to 1 [0]"),
    "repetition_penalty": Option(float, "above 1 avoids tokens seen before; over 0, to 10 [1]"),
    "presence_penalty": Option(float, "above 0 avoids tokens of the answer; -2 to 2 [0]"),
    "frequency_penalty": Option(float, "the same, stronger the more often; -2 to 2 [0]"),
    "max_tokens": Option(int, "longest answer, in tokens; at least 1"),
    "seed": Option(int, "the same seed gives the same answer [drawn]"),
    "stop": Option(str, "the answer ends before this text"),
}
RECOMMENDED = ("As long as none of the first five is given, what the model's makers\n"
               "recommend holds in place of the defaults below.")


def parse_option(name: str, value: str, label: str | None = None) -> Any:
    """A sampling option's value from text, a stop text as a list of one. `label` is what the user calls it.

    Raises `ConfigError` for an unknown name, what is not a number, and what the server would refuse.
    """
    if name not in OPTIONS:
        raise ConfigError(f"there is no option {name}{suggest(name, OPTIONS)} (options: {', '.join(OPTIONS)})")
    label, kind = label or name, OPTIONS[name].kind
    try:
        parsed = [value] if kind is str else kind(value)
    except ValueError:
        raise ConfigError(f"{label}: {value!r} is not a {'whole ' if kind is int else ''}number") from None
    check_options({name: parsed}, label)
    return parsed


def check_options(options: Mapping[str, Any], label: str | None = None) -> Any:
    """The options as the server's `SamplingFields`; `ConfigError` says what is out of range."""
    from pydantic import ValidationError

    from ..server.protocol import SamplingFields
    try:
        fields = SamplingFields.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors()[0]
        reason = first["msg"].removeprefix("Input ").removeprefix("String ")
        raise ConfigError(f"{label or first['loc'][0]} {reason}; got {first['input']!r}") from None
    if fields.max_tokens == 0:
        raise ConfigError(f"{label or 'max_tokens'} should be at least 1; got 0")
    return fields


def add_sampling_arguments(parser: argparse.ArgumentParser, limit: str) -> None:
    """Flags for the sampling options. `limit`: what the command says about the default of --max-tokens."""
    group = parser.add_argument_group("sampling", RECOMMENDED)
    for name, option in OPTIONS.items():
        notes = {"max_tokens": f" [{limit}]", "stop": "; may be repeated"}
        group.add_argument(flag(name), dest=f"option_{name}", help=option.help + notes.get(name, ""),
                           metavar={int: "N", float: "X", str: "TEXT"}[option.kind],
                           action="append" if option.kind is str else "store")


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that stand on the command line. Raises `ConfigError` for one that cannot be honoured."""
    found: dict[str, Any] = {}
    for name in OPTIONS:
        value = getattr(arguments, f"option_{name}")
        for text in value if isinstance(value, list) else [value]:
            if text is not None:
                parsed = parse_option(name, text, flag(name))
                found[name] = found.get(name, []) + parsed if isinstance(parsed, list) else parsed
    check_options(found)
    return found


def shown_options(options: Mapping[str, Any]) -> str:
    """"temperature 0.2, stop 'END'"."""
    parts = {k: " ".join(map(repr, v)) if isinstance(v, list) else f"{v:g}" if isinstance(v, float) else str(v)
             for k, v in options.items()}
    return ", ".join(f"{name} {text}" for name, text in parts.items())


def flag(name: str) -> str:
    """The option's flag."""
    return "--" + name.replace("_", "-")
