"""What the scheduler expects: how long outputs will get, and how long a step takes. Learnt from what it is told."""
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .admission import Limits
    from .request import Request
    from .table import RequestTable

PER_OCTAVE = 4       # classes of output lengths: a quarter of an octave each
CLASSES = 24 * PER_OCTAVE
MEMORY = 0.995       # what an ended output still counts after the next: the last few hundred matter
CAUTION = 1.25       # after a retraction so much more is expected, at most `MOST`; each ended output takes 2 % off
MOST = 2.0
SMOOTH = 0.1         # weight of the newest step in the pace
RECKONED = 16        # admissions
LEAST_CHUNK = 16     # prompt tokens that a step may always compute


def _classes(lengths: np.ndarray) -> np.ndarray:
    return np.minimum(np.log2(lengths + 1) * PER_OCTAVE, CLASSES - 1).astype(np.int64)


class Growth:
    """How many tokens running requests are still going to produce, from the lengths of the outputs that have ended.

    An output of n tokens is expected to end at the mean length of those that got longer than that; where none did, it
    is expected to double. What was reckoned for all running requests holds for the next `RECKONED` admissions too: they
    are expected to grow as they were.
    """

    def __init__(self) -> None:
        self.seen = 0
        self._caution = 1.0
        self._slack, self._holds = 0.0, 0  # pages beyond what is expected to be needed; for how many admissions
        self._count, self._tokens = np.zeros(CLASSES), np.zeros(CLASSES)
        self._ends: np.ndarray | None = None
        self._stale = True

    def ended(self, outputs: int) -> None:
        """An output ended after so many tokens."""
        at = min(int(math.log2(outputs + 1) * PER_OCTAVE), CLASSES - 1)
        self._count *= MEMORY
        self._tokens *= MEMORY
        self._count[at] += 1
        self._tokens[at] += outputs
        self.seen += 1
        self._caution = 1 + (self._caution - 1) * 0.98
        self._stale = True

    def retracted(self) -> None:
        """Memory became short although it was not expected to."""
        self._holds = 0
        self._caution = min(MOST, self._caution * CAUTION)

    def remaining(self, outputs: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Tokens that outputs of these lengths still get, each at most `most`: float [n]."""
        if self._stale:
            self._stale = False
            count, tokens = (np.cumsum(part[::-1])[::-1] for part in (self._count, self._tokens))
            known = count > 1e-3
            self._ends = np.where(known, tokens / np.where(known, count, 1), 0.0)
        ends = self._ends[_classes(outputs)]
        left = np.where(ends > outputs, ends - outputs, outputs + 1.0)
        return np.clip(left * self._caution, 1, np.maximum(1, most))

    def still_fits(self, request: Request, need: int, page_size: int) -> bool:
        """Does a new request that takes `need` pages fit into what was reckoned for those before it?"""
        left = 0.0 if self._ends is None else min(self._ends[0] * self._caution, request.limit)
        need += left / page_size + 1
        if self._ends is None or self._holds <= 0 or need > self._slack:
            return False
        self._slack, self._holds = self._slack - need, self._holds - 1
        return True

    def affords(self, table: RequestTable, running: dict[int, Request], request: Request, need: int, available: int,
                limits: Limits, reckoned: bool) -> bool:
        """Are `available` pages enough for a further request, which needs `need` of them now, and for what those that
        run are still going to produce? reckoned: these are the ones that were reckoned with before."""
        free = available - need
        if not running or len(running) >= free:
            return not running and free >= 0
        if not limits.foresight or self.seen < limits.foresight:
            return True
        if reckoned and self.still_fits(request, need, limits.page_size):
            return True
        return self.fits(table, np.fromiter(running, np.int32, len(running)), request, limits.page_size, free)

    def fits(self, table: RequestTable, slots: np.ndarray, request: Request, page_size: int, free: int) -> bool:
        """Will `free` pages do for what the requests in `slots` and a new one need beyond the pages they have now?"""
        most = np.append(table.end[slots] - table.known[slots], request.prompt_len + request.limit - request.known)
        if most.sum() <= (free - len(most)) * page_size:  # whatever they produce
            return True
        outputs = np.append(table.known[slots] - table.prompt_len[slots], request.known - request.prompt_len)
        own = np.append(table.page_count[slots] - table.tree_pages[slots], 0)
        self._slack, self._holds = free - self.peak(self.remaining(outputs, most), own, page_size), RECKONED
        return self._slack >= 0

    def peak(self, remaining: np.ndarray, own: np.ndarray, page_size: int) -> float:
        """The most pages that these requests will need beyond those they have, if each ends after `remaining` tokens
        and then gives back `own` pages (Gong et al. 2025, Past-Future scheduler)."""
        order = np.argsort(-remaining)
        left, own = remaining[order], own[order]
        alive = np.arange(1, len(left) + 1)
        given_back = own.sum() - np.cumsum(own)  # by those that end sooner
        return float((alive * (left / page_size + 0.5) - given_back).max())


class Pace:
    """How long a prompt token takes, and how many of them a step may have so that it ends within `target` seconds.

    The chunk shrinks with the time above the target and grows while full steps stay below it: no model of the device is
    needed. target 0: no limit.
    """

    def __init__(self, target: float, chunk: int):
        self.target, self.most = target, chunk
        self.chunk = float(chunk)
        self.per_token = 0.0

    def observe(self, prompt: int, decoding: int, seconds: float) -> None:
        """A step with so many prompt tokens and decoding requests took `seconds`."""
        if not prompt:
            return
        each = seconds / prompt
        self.per_token += (each - self.per_token) * (SMOOTH if self.per_token else 1.0)
        if not (self.target and decoding):
            return
        if seconds > self.target:
            self.chunk = max(min(LEAST_CHUNK, self.most), prompt * max(0.5, self.target / seconds))
        elif prompt >= 0.9 * self.chunk:
            self.chunk = min(self.most, self.chunk * min(1.25, self.target / max(seconds, 1e-9)))

    def budget(self, decoding: int) -> int:
        """Prompt tokens that the next step may have."""
        return int(self.chunk) if self.target and decoding else self.most
