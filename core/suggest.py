"""What a mistyped word was probably meant to be."""
from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known word most like `word`, or None. Upper and lower case are the same, dashes in front nothing."""
    by_lower = {name.lower().lstrip("-"): name for name in known}
    close = difflib.get_close_matches(word.lower().lstrip("-"), by_lower, 1, likeness)
    return by_lower[close[0]] if close else None


def suggest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """"; did you mean x?" for the closest known word, or nothing."""
    found = closest(word, known, likeness)
    return f"; did you mean {found}?" if found else ""
