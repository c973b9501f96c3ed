"""Files that a user or a model named."""
from __future__ import annotations

from pathlib import Path


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
