"""Slots of adapters: nobody waits for ever, what is in use stays, and the least recently used goes first."""
from __future__ import annotations

from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from isthmus.core.adapters.slots import PATIENCE, Slots

COST = 3  # seconds
NUMBERS = st.integers(1, 5)


def waiting(slots: Slots, *numbers: int) -> None:
    for number in numbers:
        slots.queue(number)


def start(slots: Slots, number: int) -> int:
    slots.unqueue(number)
    return slots.take(number)


def test_without_slots_nothing_is_kept_from_running():
    slots, requests = Slots(0), [SimpleNamespace(adapter=0)]
    assert slots.able(requests) is requests and slots.choose(0.0) == [] and slots.admits(0)


def test_the_least_recently_used_gives_way():
    slots = Slots(2)
    waiting(slots, 1, 2)
    assert slots.choose(0.0) == [1, 2]
    for number in (1, 2):
        slots.give_back(start(slots, number))
    slots.choose(1.0)
    waiting(slots, 1)
    slots.give_back(start(slots, 1))
    waiting(slots, 3)
    assert slots.choose(2.0) == [3] and sorted(slots.place) == [0, 1, 3]


def test_one_that_is_waited_for_keeps_its_slot_for_a_while():
    slots = Slots(1)
    waiting(slots, 1)
    slots.choose(0.0)
    slots.give_back(start(slots, 1))
    waiting(slots, 1, 2)
    assert slots.choose(PATIENCE / 2) == [] and slots.admits(1)
    assert slots.choose(PATIENCE * 2) == [2] and not slots.admits(1)


def test_a_slot_that_is_always_in_use_is_closed_until_it_is_empty():
    slots = Slots(1)
    waiting(slots, 1)
    slots.choose(0.0)
    held = start(slots, 1)
    waiting(slots, 2, 1)
    assert slots.choose(0.1) == [] and slots.admits(1)
    assert slots.choose(0.1 + PATIENCE) == [] and not slots.admits(1), "no further request of it starts"
    slots.give_back(held)
    assert slots.choose(0.2 + PATIENCE) == [2]
    slots.unqueue(1)
    assert slots.admits(2) and slots.choose(9.0) == []


def test_a_slot_opens_again_when_nobody_wants_it_any_more():
    slots = Slots(1)
    waiting(slots, 1)
    slots.choose(0.0)
    start(slots, 1)
    waiting(slots, 2)
    slots.choose(0.0)
    slots.choose(PATIENCE)
    assert not slots.admits(1)
    slots.unqueue(2)
    slots.choose(PATIENCE + 0.1)
    assert slots.admits(1)


class SlotMachine(RuleBasedStateMachine):
    """Requests of five adapters come, run and go over two slots; a request that may start is started by the policy's
    whim, so waiting for ever would be the slots' fault."""

    def __init__(self):
        super().__init__()
        self.slots, self.now = Slots(2), 0.0
        self.waits: list[int] = []
        self.runs: list[tuple[int, int]] = []

    @rule(number=NUMBERS)
    def come(self, number):
        self.slots.queue(number)
        self.waits.append(number)

    @rule(passed=st.floats(0, 2 * PATIENCE))
    def step(self, passed):
        self.now += passed
        before = {number: slot for number, slot in self.slots.place.items()}
        for number in self.slots.choose(self.now):
            assert number in self.waits and number not in before
        for number in {number for number, _ in self.runs}:
            assert self.slots.place[number] == before[number], "what runs keeps its slot"

    @rule(data=st.data())
    def run(self, data):
        able = [number for number in self.waits if self.slots.admits(number)]
        if able:
            number = data.draw(st.sampled_from(able))
            self.waits.remove(number)
            self.slots.unqueue(number)
            self.runs.append((number, self.slots.take(number)))

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def end(self, data):
        number, slot = self.runs.pop(data.draw(st.integers(0, len(self.runs) - 1)))
        self.slots.give_back(slot)

    @precondition(lambda self: self.waits)
    @rule()
    def drain(self):
        """Whoever waits runs, if those who run end and time goes by."""
        wanted = self.waits[0]
        for _ in range(20):
            while self.runs:
                self.end_first()
            self.now += PATIENCE
            self.slots.choose(self.now)
            if self.slots.admits(wanted):
                return
            for number in [number for number in self.waits if self.slots.admits(number)]:
                self.waits.remove(number)
                self.slots.unqueue(number)
                self.runs.append((number, self.slots.take(number)))
        raise AssertionError(f"adapter {wanted} waits for ever")

    def end_first(self):
        self.slots.give_back(self.runs.pop()[1])

    @invariant()
    def whole(self):
        slots = self.slots
        held = {number: slot for slot, number in enumerate(slots.holds) if number}
        assert {number: slot for number, slot in slots.place.items() if number} == held
        assert slots.waiting == {number: self.waits.count(number) for number in self.waits}
        for number in range(1, 6):
            assert slots.running(number) == sum(1 for n, _ in self.runs if n == number)


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
