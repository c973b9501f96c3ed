"""Files that a user or a model named."""
from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from .errors import ConfigError, shown


def named_path(name: str) -> Path:
    """The path, with ~ as a home folder where there is such a user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def is_there(path: Path) -> bool:
    """Is there such a file or folder? Not where the name is longer than names can be, or may not be looked at."""
    try:
        return path.exists()
    except OSError:
        return False


def kind_of(mode: int) -> str:
    """What a file of that mode is, for people."""
    kinds = ((stat.S_ISREG, "a regular file"), (stat.S_ISDIR, "a folder"), (stat.S_ISLNK, "a symbolic link"),
             (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))
    return next((words for test, words in kinds if test(mode)), "a device")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read its bytes. A pipe is not waited for, and a device is not read.

    Raises `OSError` for one that is missing or unreadable, `ValueError` with words for people for anything else.
    """
    _refuse_others(os.stat(path).st_mode)  # to open some devices is to use them
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _refuse_others(os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _refuse_others(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ValueError(f"it is {kind_of(mode)}, no regular file")


def open_private(path: str, option: str, flags: int) -> int:
    """The descriptor of a file for private data, which `option` names: made for its owner alone, or one that nobody
    else may read or write. flags: how to open it, as for `os.open`.

    Raises `ConfigError` for a link, for what is no regular file and for one that is open to others.
    """
    flags |= os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    where = f"{option} {shown(path)}"
    try:
        file = os.open(path, flags, 0o600)
    except (OSError, ValueError) as error:  # the latter of a NUL
        why = "it is a symbolic link; name the file itself" if getattr(error, "errno", None) == errno.ELOOP else (
            getattr(error, "strerror", None) or str(error)).lower()
        raise ConfigError(f"{where}: {why}") from None
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode) or os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        os.close(file)
        raise ConfigError(f"{where}: it is no regular file, or others can read it; name a new one")
    return file


def check_written(path: Path, option: str) -> Path:
    """The path of a file that is to be written, which `option` names.

    Raises `ConfigError` for what is no place for one: a folder, a device, a pipe, a missing folder.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.absolute().parent.is_dir():
            return path
        raise ConfigError(f"{option} {path}: there is no such folder") from None
    except OSError as error:
        raise ConfigError(f"{option} {path}: {(error.strerror or str(error)).lower()}") from None
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{option} {path} is {kind_of(mode)}: name a file")
    return path


def read_text(path: Path, limit: int) -> str:
    """A text in UTF-8 of at most `limit` characters.

    Raises `OSError` for a file that is missing or unreadable, `ValueError` with words for people for one that is no
    regular file (a device or a pipe may have no end), too long or not UTF-8.
    """
    if path.exists() and not path.is_file():
        raise ValueError("it is not a regular file" if not path.is_dir() else "it is a folder")
    with open(path, encoding="utf-8") as file:
        try:
            text = file.read(limit + 1)
        except UnicodeDecodeError:
            raise ValueError("the file is not a text in UTF-8") from None
    if len(text) > limit:
        raise ValueError(f"the file has more than {limit} characters")
    return text


def read_template(path: str | None) -> str | None:
    """The user's own chat template, if one is set. Raises `ConfigError` when there is no such text."""
    if not path:
        return None
    from .text.template import MAX_SOURCE
    try:
        return read_text(named_path(path), MAX_SOURCE)
    except OSError as error:
        raise ConfigError(f"--chat-template {path}: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:
        raise ConfigError(f"--chat-template {path}: {error}") from None
