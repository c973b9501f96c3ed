"""What drafts came to: by place in the draft, and by request."""
from __future__ import annotations

from typing import Any

import numpy as np


class DraftStats:
    """Counters only grow. tokens: the longest draft. seqs: sequence slots."""

    def __init__(self, tokens: int, seqs: int):
        self._tokens = tokens
        self._slots = np.zeros((2, seqs), np.int64)  # drafted and accepted by the request in each slot
        self.reset()

    def reset(self) -> None:
        """Count from zero again."""
        self.drafts = 0
        self.proposed, self.kept = np.zeros(self._tokens, np.int64), np.zeros(self._tokens, np.int64)

    def count(self, slots: np.ndarray, counts: np.ndarray, accepted: np.ndarray) -> None:
        """Drafts of the requests in these slots: their lengths, and how many tokens were accepted, int32 [n]."""
        self.drafts += len(slots)
        for places, lengths in ((self.proposed, counts), (self.kept, accepted)):
            # A draft of n tokens counts at its first n places.
            places += len(lengths) - np.cumsum(np.bincount(lengths, minlength=self._tokens + 1))[:self._tokens]
        self._slots[0, slots] += counts
        self._slots[1, slots] += accepted

    def of(self, slot: int) -> tuple[int, int]:
        """(drafted, accepted) tokens of the request that leaves this slot."""
        drafted, accepted = self._slots[:, slot].tolist()
        self._slots[:, slot] = 0
        return drafted, accepted

    def snapshot(self) -> dict[str, Any]:
        """As plain numbers; lists are by place, the first one first."""
        return {"drafts": self.drafts, "drafted_tokens": int(self.proposed.sum()),
                "accepted_tokens": int(self.kept.sum()), "drafted_at": self.proposed.tolist(),
                "accepted_at": self.kept.tolist()}
