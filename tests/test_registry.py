"""Registries: names are taken once, and a contract is checked whole."""
from __future__ import annotations

from typing import Protocol

import pytest
from isthmus.core.registry import RegistrationError, Registry, signature_gaps


class Contract(Protocol):
    def order(self, waiting, now): ...

    def clear(self): ...


class Good:
    def __init__(self, size=1):
        self.size = size

    def order(self, waiting, now, hint=None):
        return waiting

    def clear(self):
        pass


def registry() -> Registry:
    return Registry("test policy", Contract, ("order", "clear"))


def test_a_registered_name_makes_instances():
    policies = registry()
    assert policies.register("good", Good) is Good
    assert policies.create("good", size=3).size == 3
    assert policies.names() == list(policies) == ["good"]


@pytest.mark.parametrize("name", ["auto", "", "two words", "a/b"])
def test_reserved_names_and_what_is_no_word(name):
    with pytest.raises(RegistrationError, match="is reserved or not a word"):
        registry().register(name, Good)


def test_a_name_is_taken_once():
    policies = registry()
    policies.register("good", Good)
    with pytest.raises(RegistrationError, match="test policy 'good' is registered already, by"):
        policies.register("good", Good)


def test_an_unknown_name_lists_those_there_are():
    policies = registry()
    policies.register("b", Good)
    policies.register("a", Good)
    with pytest.raises(RegistrationError, match="unknown test policy 'c'; there are: a, b"):
        policies.create("c")


class Short:
    def order(self, waiting):
        return waiting


class Demanding(Good):
    def order(self, waiting, now, budget):
        return waiting


class Swapped(Good):
    def order(self, now, waiting):
        return waiting


class ByName(Good):
    def order(self, waiting, *, now):
        return waiting


class Open(Good):
    def order(self, waiting, **more):
        return waiting


@pytest.mark.parametrize(("entry", "gaps"), [
    (Good, []),
    (Open, []),
    (Short, ["order() lacks the parameters now", "clear(self) is missing"]),
    (Demanding, ["order() requires parameters that nobody passes: budget"]),
    (Swapped, ["order() takes its parameters in another order: self, now, waiting"]),
    (ByName, ["order() takes by name only what is passed by position: now"]),
    (object, ["order(self, waiting, now) is missing", "clear(self) is missing"]),
])
def test_every_gap_is_named_at_once(entry, gaps):
    assert signature_gaps(entry, Contract, ("order", "clear")) == gaps
    if gaps:
        with pytest.raises(RegistrationError) as caught:
            registry().register("x", entry)
        assert all(gap in str(caught.value) for gap in gaps)
