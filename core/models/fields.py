"""Reading a checkpoint's configuration: each value is checked where it is read, and an error names key and value."""
from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CheckpointError

_REQUIRED = object()


class Fields:
    """A configuration mapping (the words of a Hugging Face config.json) with checked reads.

    A key whose value is None counts as absent. Every method raises `CheckpointError` for a missing key without a
    default and for a value of the wrong type or out of range.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config"):
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{where} must be a mapping, not {_shown(values)}")
        self.values, self.where = values, where

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value as it is."""
        value = self.values.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"{self.where} lacks {key!r}")
        return default

    def integer(self, key: str, default: Any = _REQUIRED, low: int = 1, high: int = 2**31 - 1) -> int:
        """A whole number in low..high; a float such as 8.0 counts."""
        value = self.get(key, default)
        if not _is_number(value) or value != int(value) or not low <= value <= high:
            raise self.error(key, value, f"a whole number from {low} to {high}" if low < high else str(low))
        return int(value)

    def number(self, key: str, default: Any = _REQUIRED, low: float = 0.0, high: float = math.inf) -> float:
        """A finite number with low < value <= high."""
        value = self.get(key, default)
        if not _is_number(value) or not low < value <= high:
            raise self.error(key, value, f"a number above {low:g}" + (f", at most {high:g}" if high < math.inf else ""))
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """As `number`, None where the key is absent."""
        return self.number(key) if key in self else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def choice(self, key: str, supported: Mapping[str, str], default: Any = _REQUIRED) -> str:
        """The word's meaning in `supported`; any other word is an error that lists the supported ones."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in supported:
            raise self.error(key, value, "one of " + ", ".join(sorted(supported)))
        return supported[value]

    def numbers(self, key: str, count: int) -> list[float]:
        """Exactly `count` finite numbers above 0."""
        value = self.get(key)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != count:
            raise self.error(key, value, f"a list of {count} numbers")
        return [Fields({key: v}, self.where).number(key) for v in value]

    def error(self, key: str, value: Any, supported: str) -> CheckpointError:
        """An error that names the place, the key, the value and what is supported."""
        return CheckpointError(f"{self.where}: {key} = {_shown(value)} is not supported; it must be {supported}")


def _is_number(value: Any) -> bool:
    """Of integers those that a float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
