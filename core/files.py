"""Files that a user or a model named."""
from __future__ import annotations

from pathlib import Path

from .errors import ConfigError


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
