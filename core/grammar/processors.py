"""Logits processors: code of the server's owner that forbids tokens or biases them, chosen by clients by its name.

A package offers one as an entry point of the group `isthmus.logits_processors`, and `--logits-processors NAME` lets it
in. Nothing that a client sends is ever code.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from ..errors import ConfigError, said
from ..registry import RegistrationError, Registry
from ..suggest import suggest
from .vocabulary import Vocabulary

GROUP = "isthmus.logits_processors"


class LogitsProcessor(ABC):
    """One for each answer. What it does must follow from its arguments, the prompt and the output alone: a request may
    be computed anew, with the same output so far."""

    @abstractmethod
    def __init__(self, arguments: Mapping[str, Any], prompt: np.ndarray, vocabulary: Callable[[], Vocabulary]):
        """arguments: as the client sent them, JSON. prompt: ids, int32 [n]. vocabulary: makes the model's tokens, which
        takes a moment at the first use. Raises ValueError, with words for the client, for arguments that are wrong."""

    @abstractmethod
    def narrow(self, output: np.ndarray, row: np.ndarray) -> None:
        """Forbid what may not come next. output: ids so far, int32 [n]. row: uint32 [ceil(V / 32)], bit j of word i for
        token 32 * i + j; bits may be cleared and none set."""

    def bias(self) -> Mapping[int, float]:
        """Token id -> what is added to its logit at every step."""
        return {}


PROCESSORS = Registry("logits processor", LogitsProcessor, ("narrow",))


def load_processors(names: Iterable[str]) -> None:
    """Import and register these. Raises `ConfigError` for one that no package offers, or that cannot be loaded."""
    for name in names:
        if name in PROCESSORS.names():
            continue
        offers = {entry.name: entry for entry in entry_points(group=GROUP)}
        if name not in offers:
            there = f"; there are: {', '.join(sorted(offers))}" if offers else "; none is installed"
            raise ConfigError(f"--logits-processors {name}: no package offers it{suggest(name, offers)}{there}")
        try:
            PROCESSORS.register(name, offers[name].load())
        except (RegistrationError, Exception) as error:  # it is foreign code
            raise ConfigError(f"--logits-processors {name}: it cannot be loaded: {said(error)}") from error
