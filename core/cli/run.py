"""Runs one command of the command line."""
from __future__ import annotations

import errno
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..env import debug_level
from ..errors import ConfigError, IsthmusError, cut, said
from ..files import is_there
from ..logs import announce, set_up_logging
from ..settings import Resolved, check_platform, list_settings, resolve, shown, unknown_variables
from .encoding import accept_every_character
from .main import INTERRUPTED, interruptible
from .parser import build_parser, find_command, given_settings, overview
from .process import cut_off

USAGE, FAILED = 2, 1
MAX_MESSAGE = 4000  # characters; whatever an error repeats, a terminal shows it


def run(argv: Sequence[str]) -> int:
    """Run one command; the exit code: 0 done, 1 failed, 2 a deliberate error told in one line."""
    accept_every_character()
    try:
        code = _run(list(argv))
        if sys.stdout and not sys.stdout.closed:
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output has gone, as `isthmus models | head -1` does
        sys.stderr.close()
        return FAILED
    except Exception as error:
        if cut_off(error):
            return INTERRUPTED
        if not _deliberate(error):
            raise
        if debug_level():
            sys.excepthook(type(error), error, error.__traceback__)
        announce(f"isthmus: {cut(said(error), MAX_MESSAGE)}", logging.ERROR)
        if isinstance(error, OSError):
            with suppress(OSError):  # else Python tries once more to write what is left
                sys.stdout.close()
        return USAGE


def _deliberate(error: Exception) -> bool:
    if isinstance(error, IsthmusError) or isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return True
    from ..platform import Unavailable, Unsupported
    from ..registry import RegistrationError
    return isinstance(error, Unavailable | Unsupported | RegistrationError)


def _show_origins(resolved: Resolved) -> None:
    """The settings that somebody set, as ISTHMUS_DEBUG=1 promises."""
    for name, origin in resolved.origin.items():
        if origin != "default":
            setting = list_settings()[name]
            announce(f"isthmus: {setting.flag} {shown(resolved.config, setting)} ({origin})")


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        if argv[1:]:
            argv = [*argv[1:], "--help"]
        else:
            print(overview())
            return 0
    if argv[0] in ("-V", "--version"):
        argv = ["version"]
    command, words = find_command(argv)
    parser = build_parser(command)
    module = importlib.import_module(command.module, __package__)
    module.add_arguments(parser)
    arguments = parser.parse(words)
    accept_every_character(getattr(arguments, "json", False))
    resolved = None
    if command.groups:
        file = Path(arguments.config) if arguments.config else None
        if file and not (is_there(file) and file.is_file()):
            raise ConfigError(f"--config {file}: "
                              f"{'it is no regular file' if is_there(file) else 'there is no such file'}")
        resolved = resolve(given_settings(arguments), os.environ, file)
        if command.name == "serve" or debug_level():
            set_up_logging(resolved.config.server)
        for warning in unknown_variables(os.environ):
            announce(f"isthmus: {warning}", logging.WARNING)
        if debug_level():
            _show_origins(resolved)
        if "model" in command.groups:  # the other, doctor, tells about a platform that is not there
            check_platform(resolved)
        if "speculation" in command.groups and resolved.config.speculation.speculative:
            from ..speculation.options import described
            described(resolved.config.speculation.speculative)
    interruptible()
    return module.run(arguments, resolved)
