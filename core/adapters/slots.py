"""Which adapter is in which slot, and which one goes for another. Integers only; the caller gives the time.

An adapter has a number, which is never used again: 1, 2 ... in the order of loading; 0 is no adapter, and its slot is
always there. A request can run while its adapter has a slot. The adapter that was used longest ago gives way, among
those that no running request uses, and an adapter that requests wait for only when it has had its slot for `PATIENCE`.
Where all are in use, one is closed after that time: no further request of it starts until it has given way.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..scheduler.request import Request

PATIENCE = 0.5  # seconds


class Slots:
    """place: number -> slot. holds: number in each slot, 0 = empty. waiting: number -> requests that wait, in the order
    in which adapters came to be waited for."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.place: dict[int, int] = {0: 0}
        self.holds = [0] * (count + 1)
        self.waiting: dict[int, int] = {}
        self._running = [0] * (count + 1)
        self._used = [0.0] * (count + 1)
        self._since: dict[int, float] = {}  # when an adapter without a slot was first wanted
        self._closed = -1
        self._now = 0.0
        self.moves = 0                      # adapters that came to a slot

    # ---- what the scheduler tells

    def queue(self, number: int) -> None:
        """A request of this adapter waits."""
        self.waiting[number] = self.waiting.get(number, 0) + 1

    def unqueue(self, number: int) -> None:
        """It waits no more."""
        left = self.waiting[number] - 1
        if left:
            self.waiting[number] = left
        else:
            del self.waiting[number]

    def take(self, number: int) -> int:
        """A request of this adapter runs from now on: its slot."""
        slot = self.place[number]
        self._running[slot] += 1
        self._used[slot] = self._now
        return slot

    def give_back(self, slot: int) -> None:
        """A request in this slot runs no more."""
        self._running[slot] -= 1
        self._used[slot] = self._now

    # ---- what the scheduler asks

    def admits(self, number: int) -> bool:
        """May a request of this adapter start?"""
        slot = self.place.get(number, -1)
        return slot >= 0 and slot != self._closed

    def able(self, requests: Iterable[Request]) -> Iterable[Request]:
        """Those of the requests that may start."""
        return (request for request in requests if self.admits(request.adapter)) if self.count else requests

    def running(self, number: int) -> int:
        """Requests of this adapter that run."""
        slot = self.place.get(number, 0)
        return self._running[slot] if slot else 0

    def using(self, number: int) -> int:
        """Requests of this adapter that run or wait."""
        return self.waiting.get(number, 0) + self.running(number)

    # ---- between steps

    def choose(self, now: float) -> list[int]:
        """Give slots to adapters that are waited for, as far as there are any: the numbers that came to one."""
        self._now = now
        wanted = [number for number in self.waiting if number not in self.place] if self.count else []
        self._since = {number: self._since.get(number, now) for number in wanted}
        came = []
        for number in wanted:
            slot = self._vacant()
            if not slot:
                break
            self.put(number, slot)
            came.append(number)
        late = [number for number in wanted if number not in self.place and now - self._since[number] >= PATIENCE]
        if not late:
            self._closed = -1
        elif self._closed < 0:
            self._closed = min(range(1, self.count + 1), key=self._used.__getitem__)
        return came

    def put(self, number: int, slot: int) -> None:
        """The adapter has this slot from now on."""
        self.forget(self.holds[slot])
        self.holds[slot], self.place[number], self._used[slot] = number, slot, self._now
        self.moves += 1

    def forget(self, number: int) -> None:
        """The adapter has no slot any more. No request of it may run."""
        slot = self.place.pop(number, 0) if number else 0
        if slot:
            assert not self._running[slot], f"{self._running[slot]} requests run with the adapter in slot {slot}"
            self.holds[slot], self._used[slot] = 0, 0.0
            if slot == self._closed:
                self._closed = -1

    def _vacant(self) -> int:
        """A slot that may be given away; 0 if there is none."""
        idle = [slot for slot in range(1, self.count + 1) if not self._running[slot]]
        free = [slot for slot in idle if not self.holds[slot] or slot == self._closed
                or self.holds[slot] not in self.waiting or self._now - self._used[slot] >= PATIENCE]
        return min(free, key=lambda slot: (self.holds[slot] in self.waiting, self._used[slot]), default=0)
