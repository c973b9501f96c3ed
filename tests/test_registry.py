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


class Inherited(Contract):
    def order(self, waiting, now): ...


class Open(Good):
    def order(self, waiting, **more):
        return waiting


@pytest.mark.parametrize(("entry", "gaps"), [
    (Good, []),
    (Open, []),
    (Short, ["order() lacks the parameters now", "clear(self) is missing"]),
    (Demanding, ["order() requires parameters that nobody passes: budget"]),
    (Swapped, ["order() takes its parameters in another order: self, now, waiting"]),
    (Inherited, ["clear(self) is missing"]),
    (ByName, ["order() takes by name only what is passed by position: now"]),
    (object, ["order(self, waiting, now) is missing", "clear(self) is missing"]),
])
def test_every_gap_is_named_at_once(entry, gaps):
    assert signature_gaps(entry, Contract, ("order", "clear")) == gaps
    if gaps:
        with pytest.raises(RegistrationError) as caught:
            registry().register("x", entry)
        assert all(gap in str(caught.value) for gap in gaps)


class Eager(Protocol):
    def draw(self, rows, count=1, *, seed=None): ...


class Needy:
    def draw(self, rows, count, seed):
        return rows


class Proxy:
    """Passes everything on, as wrappers do."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


class Narrow:
    def draw(self, rows):
        return rows


def test_what_may_be_left_out_is_not_required():
    assert signature_gaps(Needy, Eager, ("draw",)) == ["draw() requires what may be left out: count, seed"]


def test_parameters_that_a_contract_got_later_may_be_missing():
    assert signature_gaps(Narrow, Eager, ("draw",)) == ["draw() lacks the parameters count, seed"]
    assert signature_gaps(Narrow, Eager, ("draw",), ["draw.count", "draw.seed"]) == []


def test_an_object_is_looked_at_as_its_class_is():
    """Also one that passes its methods on, and one that has nothing but the contract's."""
    for entry in (Good, Short, Demanding, Swapped, ByName, Inherited):
        methods = ("order", "clear")
        want = [gap.replace("another order: self, ", "another order: ") for gap in
                signature_gaps(entry, Contract, methods)]
        assert signature_gaps(entry(), Contract, methods) == want
    assert signature_gaps(Proxy(Good()), Contract, ("order", "clear")) == []
    assert signature_gaps(Proxy(Short()), Contract, ("order", "clear"))[1] == "clear(self) is missing"
