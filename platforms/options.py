"""Options of a platform (`--platform-option name=value`): which there are."""
from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from ..core.platform import Unavailable


def check_options(platform: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise `Unavailable` that names the first of the `given` names which is not `known`, and what was meant."""
    for name in sorted(set(given) - set(known)):
        close = difflib.get_close_matches(name.lower(), known, 1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}" if known else "it has none"
        raise Unavailable(f"the {platform} platform has no option {name}; {hint}")
