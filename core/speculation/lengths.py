"""How many tokens each request drafts, from how often its drafts were right and from what steps were seen to take.

A request whose drafted tokens are right with probability p gets from the j-th one p^j tokens more, on average, in a
step that takes c seconds longer for it. That pays while p^j is more than what the same time gives otherwise: a plain
step gives one token to each of its n requests in t seconds, so p^j > c n / t. A draft ends where it stops paying, and a
request for which not even the first token pays does not draft for a while.

Whether all of it pays is not computed but seen: tokens per second of steps with drafts, the overlap that they give up
included, beside those of plain steps of as many requests. Where drafting loses, nobody drafts for a while.
"""
from __future__ import annotations

import logging

import numpy as np

log = logging.getLogger(__name__)

PRIOR, WEIGHT = 0.6, 2.0   # what is believed of a request's p before its first draft; for how many tokens that counts
FADE = 0.9                 # what a draft still counts after the next
SMOOTH = 0.1               # weight of the newest step in what steps take
FIRST, PATIENCE = 8, 32    # plain steps that are measured before drafts are; plans that wait for them at most
FADING, DOUBT = 0.97, 0.9  # the same of what a drafted token takes; what is left of it each time it is too much
LEAST = 1e-3               # tokens that a drafted token is taken to cost at least
GUESS, SEEN = 0.15, 4      # the same until so many steps with drafts were seen, of one token for each request
MARGIN = 0.98              # slower than so much of the speed of plain steps is slower
TRIAL = 16                 # steps with drafts after which they are held to plain ones
AGAIN, RENEWED = 192, 8    # after so many steps with drafts so many plain ones are measured anew
SHORTEST, LONGEST = 64, 4096  # steps of a pause for all; each is twice as long as the one before
TRIES, SLOT_LONGEST = 4, 64   # drafts asked for in vain before a request pauses; its longest pause
CLASSES = 16               # of numbers of requests: powers of two


class _Pace:
    """Tokens and seconds of a step, smoothed: steps of one kind and class of size."""

    def __init__(self) -> None:
        self.count, self.tokens, self.seconds = 0, 0.0, 0.0

    def see(self, tokens: float, seconds: float) -> None:
        if self.count > FIRST:
            seconds = min(seconds, 4 * self.seconds)  # the machine was busy with something else
        weight = max(SMOOTH, 1 / (self.count + 1))
        self.count += 1
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)

    @property
    def rate(self) -> float:
        """Tokens per second; 0 when no time was seen to pass."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class _Cost:
    """Seconds that a drafted token takes, from steps that had different numbers of them: the slope of a line."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of 1, drafted, drafted squared, seconds, drafted times seconds
        self.seen = 0

    def see(self, drafted: int, seconds: float) -> None:
        self.seen += drafted > 0
        self._sums = FADING * self._sums + (1, drafted, drafted**2, seconds, drafted * seconds)

    def doubt(self) -> None:
        """It was found too high to draft at all, and so would never be seen again."""
        self._sums[4] = DOUBT * self._sums[4] + (1 - DOUBT) * self._sums[1] * self._sums[3] / max(1.0, self._sums[0])

    def each(self, plain: float) -> float:
        """Of a token, 0 when nothing is known. plain: seconds of a step without any, for where all had as many."""
        count, drafted, squares, seconds, products = self._sums.tolist()
        if not drafted:
            return 0.0
        spread = squares / count - (drafted / count) ** 2
        if spread > 0.25:
            return max(0.0, (products / count - drafted / count * seconds / count) / spread)
        return max(0.0, (seconds / count - plain) / (drafted / count))


class Lengths:
    """Of the requests in `seqs` sequence slots, at most `tokens` each. fixed: always `tokens`."""

    def __init__(self, seqs: int, tokens: int, fixed: bool = False):
        self._seqs, self._tokens, self._fixed = seqs, tokens, fixed
        self.forget_all()

    def forget_all(self) -> None:
        """Begin anew."""
        self._right, self._tried = np.zeros(self._seqs), np.zeros(self._seqs)
        self._vain = np.zeros(self._seqs, np.int32)     # drafts in a row that were asked for and did not come
        self._rest = np.zeros(self._seqs, np.int32)     # plans until the slot drafts again
        self._pause = np.full(self._seqs, TRIES, np.int32)
        self._plain, self._drafting = ([_Pace() for _ in range(CLASSES)] for _ in range(2))
        self._costs = [_Cost() for _ in range(CLASSES)]
        self._missed = np.zeros(CLASSES, np.int32)      # plans without drafts for want of measurements
        self._rests, self._wait, self._since = 0, SHORTEST, 0
        self.state = "on"

    def forget(self, slot: int) -> None:
        """Another request comes to this slot."""
        self._right[slot] = self._tried[slot] = self._vain[slot] = self._rest[slot] = 0
        self._pause[slot] = TRIES

    def soon(self, slots: np.ndarray) -> bool:
        """May one of these draft at the next plan?"""
        if self._fixed:
            return bool(len(slots))
        return self._rests <= 1 and bool(len(slots)) and int(self._rest[slots].min()) <= 1 and (
            self._measured(_class(len(slots))))

    def most(self, slots: np.ndarray) -> np.ndarray:
        """Most drafted tokens of each in the step that is planned: int32 [n]."""
        if self._fixed:
            return np.full(len(slots), self._tokens, np.int32)
        size = _class(len(slots))
        self._rest[slots] = rest = np.maximum(self._rest[slots] - 1, 0)
        if self._rests > 0:
            self._rests -= 1
            if not self._rests:
                self._drafting, self.state = [_Pace() for _ in range(CLASSES)], "on"
            return np.zeros(len(slots), np.int32)
        if not self._measured(size):
            self._missed[size] += 1
            return np.zeros(len(slots), np.int32)
        chance = (self._right[slots] + PRIOR * WEIGHT) / (self._tried[slots] + WEIGHT)
        price = self._price(size, len(slots))
        if price >= 1:
            most = np.zeros(len(slots), np.int32)
            self._costs[size].doubt()
        else:  # how often a token may be wrong before it: p^j > price
            chance = np.clip(chance, 1e-3, 0.999)
            most = np.minimum(np.log(price) / np.log(chance), self._tokens).astype(np.int32)
        if self._costs[size].seen < SEEN:
            most = np.minimum(most, 1)
        most[rest > 0] = 0
        self._rest_where(slots[(most == 0) & (rest == 0)])
        return most

    def asked(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """So many tokens were proposed for each, int32 [n]: one that gets none again and again pauses."""
        vain = np.where(counts > 0, 0, self._vain[slots] + 1)
        self._vain[slots] = vain
        self._pause[slots[counts > 0]] = TRIES
        self._rest_where(slots[vain >= TRIES])

    def settled(self, slots: np.ndarray, counts: np.ndarray, accepted: np.ndarray) -> None:
        """What came of drafts of `counts` tokens, int32 [n]."""
        self._right[slots] = FADE * self._right[slots] + accepted
        self._tried[slots] = FADE * self._tried[slots] + accepted + (accepted < counts)

    def stepped(self, requests: int, drafted: int, tokens: int, seconds: float, waited: bool) -> None:
        """A step without prompts took `seconds` and gave `tokens` to its requests. waited: it was planned after the one
        before was settled."""
        size = _class(requests)
        if not waited:
            if drafted == 0:
                self._plain[size].see(tokens, seconds)
            return
        plain, drafting = self._plain[size], self._drafting[size]
        drafting.see(tokens, seconds)
        self._costs[size].see(drafted, min(seconds, 4 * drafting.seconds))
        self._since += 1
        if self._fixed or self._rests or plain.count < FIRST:
            return
        if drafting.count >= TRIAL and drafting.rate < MARGIN * plain.rate:
            self._stop(requests, drafting.rate, plain.rate)
        elif self._since >= AGAIN:
            self._rests, self._since, self._wait = RENEWED, 0, SHORTEST

    # ---- inside

    def _measured(self, size: int) -> bool:
        """Is it known what plain steps take, or is that not to be learnt soon?"""
        return self._plain[size].count >= FIRST or bool(self._missed[size] >= PATIENCE)

    def _price(self, size: int, requests: int) -> float:
        """What a drafted token must give: tokens that the time for it gives otherwise. Above 0."""
        plain, cost = self._plain[size].seconds, self._costs[size]
        if cost.seen < SEEN:
            return GUESS
        return max(LEAST, cost.each(plain) * requests / plain) if plain else LEAST

    def _rest_where(self, slots: np.ndarray) -> None:
        self._rest[slots], self._vain[slots] = self._pause[slots], 0
        self._pause[slots] = np.minimum(2 * self._pause[slots], SLOT_LONGEST)

    def _stop(self, requests: int, drafting: float, plain: float) -> None:
        self._rests, self._since = self._wait, 0
        self.state = (f"paused for {self._wait} steps: {drafting:.0f} tokens/s with drafts and {plain:.0f} without, at "
                      f"batches of about {requests}")
        if self._wait < LONGEST:
            log.info("speculation is %s", self.state)
        self._wait = min(2 * self._wait, LONGEST)


def _class(requests: int) -> int:
    return min(CLASSES - 1, requests.bit_length() - 1)
