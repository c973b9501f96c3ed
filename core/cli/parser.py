"""The command line: flags are derived from the settings, typos get a suggestion."""
from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Sequence
from typing import Any, NoReturn

from ..config import Config
from ..errors import ConfigError
from ..settings import Setting, list_settings, shown
from ..suggest import suggest
from .commands import COMMANDS, Command

OVERVIEW = """\
usage: isthmus COMMAND [options]

A serving engine for large language models.

commands:
{commands}

start here:
  isthmus serve     # http://127.0.0.1:8000/v1 for every OpenAI client
  isthmus chat      # the same model in this terminal

`isthmus COMMAND --help` explains a command's options. Settings may also stand in a YAML file (--config FILE or
ISTHMUS_CONFIG=FILE) or in the environment (ISTHMUS_PORT=9000); `isthmus explain` tells which one counts.
ISTHMUS_CACHE=FOLDER is where downloaded models are kept."""


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` instead of leaving; knows no abbreviations, since a later flag may make one ambiguous."""

    def __init__(self, command: Command):
        parts = ["\n".join(["examples:", *(f"  {line}" for line in command.examples)])] if command.examples else []
        super().__init__(
            prog=f"isthmus {command.name}", usage=f"isthmus {command.name} {command.words}",
            description=command.help[0].upper() + command.help[1:] + ".",
            epilog="\n\n".join([*_list_parts(command), *parts, *command.notes]) or None, allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
                prog, max_help_position=34, width=min(shutil.get_terminal_size().columns, 120)))
        self.extra = f"; {command.extra}" if command.extra else ""
        self.rest = command.rest
        self._negative_number_matcher = re.compile(r"-\.?\d")  # "-1GiB" is a value too: who checks it names it

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse, or raise `ConfigError` that suggests the flag that was probably meant."""
        rest: Sequence[str] = ()
        if self.rest and "--" in argv:
            argv, rest = argv[:argv.index("--")], argv[argv.index("--") + 1:]
        arguments, unknown = self.parse_known_args(argv, argparse.Namespace(rest=list(rest)) if self.rest else None)
        if unknown:
            word = next((u for u in unknown if u.startswith("-")), unknown[0])
            flags = [f for action in self._actions for f in action.option_strings if f.startswith("--")]
            hint = suggest(word.partition("=")[0], flags) if word.startswith("-") else self.extra
            self.error(f"unknown {'option' if word.startswith('-') else 'argument'} {word}{hint}")
        return arguments


def _list_parts(command: Command) -> list[str]:
    if not command.parts:
        return []
    width = max(len(part.name) for part in command.parts)
    lines = [f"  {part.name:{width}}  {part.help}" for part in command.parts]
    return ["\n".join([f"parts (`isthmus {command.name} PART --help`; without one it is the first):", *lines])]


def build_parser(command: Command) -> Parser:
    """A command's parser with the flags of its groups of settings."""
    parser = Parser(command)
    defaults, settings = Config(), list_settings().values()
    for name in command.groups:
        about = type(getattr(defaults, name)).__doc__.splitlines()[0].rstrip(".")
        group = parser.add_argument_group(f"{name}: {about}")
        for setting in settings:
            if setting.group == name:
                help = "help" if "model" in command.groups or not setting.meta("client") else "client"
                _add_setting(group, setting, defaults, not command.shown or setting.name in command.shown, help)
    if command.groups:
        parser.add_argument("--config", metavar="FILE", help="YAML file with settings; ISTHMUS_<SETTING> variables and "
                            "flags win over it")
    return parser


def _add_setting(group: Any, setting: Setting, defaults: Config, visible: bool, help: str) -> None:
    default = shown(defaults, setting)
    note = f" ({setting.meta('unit')})" if setting.meta("unit") not in (None, "bytes") else ""
    text = f"{setting.meta(help)}{note}" + ("" if default == "-" else f" [{default}]")
    common: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS,
                              "help": text.replace("%", "%%") if visible else argparse.SUPPRESS}
    if setting.type is bool:
        group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, **common)
    elif setting.type is tuple and not setting.meta("metavar"):
        group.add_argument(setting.flag, action="append", metavar="KEY=VALUE", **common)
    else:
        choices = "{" + ",".join(setting.choices) + "}"
        kinds = {int: "N", float: "X", str: "TEXT", tuple: setting.meta("metavar")}
        metavar = setting.meta("metavar") or (choices if setting.choices else kinds[setting.type])
        group.add_argument(setting.flag, metavar=metavar, **common)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """The model as the first word, as an alternative to --model."""
    parser.add_argument("model_word", nargs="?", metavar="MODEL", help="the same as --model")


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that stand on the command line, by name."""
    given = {name: getattr(arguments, name) for name in list_settings() if hasattr(arguments, name)}
    word = getattr(arguments, "model_word", None)
    if word is not None:
        if given.get("model", word) != word:
            raise ConfigError(f"two models are named: {word} and --model {given['model']}")
        given["model"] = word
    return given


def overview() -> str:
    """The text of `isthmus --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {c.name:{width}}  {c.help}" for c in COMMANDS.values()]
    return OVERVIEW.format(commands="\n".join(lines))


def find_command(argv: Sequence[str]) -> tuple[Command, Sequence[str]]:
    """The command that the words begin with, and the words after its name; `ConfigError` with a suggestion when there
    is none."""
    word, *rest = argv
    if word not in COMMANDS:
        kind, known = ("option", ("--help", "--version")) if word.startswith("-") else ("command", COMMANDS)
        raise ConfigError(f"unknown {kind} {word}{suggest(word, known)} (see `isthmus --help`)")
    command = COMMANDS[word]
    if not command.parts or not rest or rest[0].startswith("-"):
        return command, rest
    parts = {part.name.partition(" ")[2]: part for part in command.parts}
    if rest[0] not in parts:
        raise ConfigError(f"isthmus {word} has no part {rest[0]}{suggest(rest[0], parts)}; there are: "
                          f"{', '.join(parts)}")
    return parts[rest[0]], rest[1:]
